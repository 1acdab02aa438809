// The state of the workers and of the requests that they run.
const rates = new Map();

const span = (seconds) => {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
};

// By how much a number grew in a second since the last look, in the same life of the worker.
const rate = (name, worker, value) => {
  const before = rates.get(name);
  rates.set(name, { epoch: worker.epoch, at: worker.uptime_s, value });
  if (!before || before.epoch !== worker.epoch || worker.uptime_s <= before.at) return null;
  return Math.max(0, (value - before.value) / (worker.uptime_s - before.at));
};

const card = (worker) => {
  const box = element("div", "", "worker");
  const title = element("div", "", "title");
  const progress = worker.progress && worker.progress.fraction != null && worker.state !== "ready"
    ? ` ${Math.round(100 * worker.progress.fraction)} %` : "";
  title.append(element("h2", worker.model || "No model yet"), element("span", worker.state + progress, `state ${worker.state}`));
  box.append(title);
  if (worker.state === "silent") {
    box.append(element("p", "No answer. Answers go on when the worker is back."), element("p", worker.address, "address"));
    return box;
  }
  const n = worker.numbers;
  const speed = rate(worker.address, worker, n.generated_tokens || 0);
  box.append(element("p", `${n.running || 0} running, ${n.queued || 0} waiting, ${speed == null ? "-" : Math.round(speed)} tokens/s, `
    + `${many(n.sessions || 0, "front-end")}, up ${span(worker.uptime_s)}` + (n.restarts ? `, restarted ${n.restarts}x` : "")));
  const parts = Object.entries(worker.memory || {}).filter(([part, held]) => part !== "limit" && held > 0).sort((a, b) => b[1] - a[1]);
  const held = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const limit = (worker.memory || {}).limit || 0;
  if (limit) {
    const bar = element("meter");
    bar.max = limit;
    bar.high = 0.9 * limit;
    bar.value = held;
    bar.setAttribute("aria-label", `memory of ${worker.address}`);
    box.append(bar);
    box.append(element("p", `Memory: ${size(held)} of ${size(limit)}: ` + parts.map(([part, bytes]) => `${part.replaceAll("_", " ")} ${size(bytes)}`).join(", ")));
  }
  const prompts = (n.prompt_tokens || 0) + (n.cached_tokens || 0);
  box.append(element("p", `Prompt cache: ${many(n.prompt_cache_entries || 0, "prompt")}, ${size(n.prompt_cache_bytes || 0)}`
    + (prompts ? `, ${Math.round(100 * (n.cached_tokens || 0) / prompts)} % of prompt tokens from it` : "")
    + (n.pass_ms_p50 ? `, pass ${n.pass_ms_p50.toFixed(1)} ms` : "")));
  box.append(element("p", worker.address, "address"));
  return box;
};

const row = (worker, request) => {
  const clients = new Map(worker.sessions.map((session) => [session.id, session.client || session.id]));
  const speed = rate(`${worker.address}/${request.session}/${request.request}`, worker, request.output_tokens);
  const line = element("tr");
  const cells = [request.request, clients.get(request.session) || "", request.waits_for ? `waits: ${request.waits_for.split(":")[0]}` : request.phase,
    request.phase === "prefill" ? `${request.prefilled_tokens}/${request.prompt_tokens}` : request.prompt_tokens,
    `${request.output_tokens}/${request.max_tokens}`, speed == null ? "" : Math.round(speed), span(request.age_s)];
  cells.forEach((text, place) => line.append(element("td", String(text), place > 2 ? "n" : "")));
  line.firstChild.title = request.request;
  line.title = request.waits_for;
  return line;
};

const show = (status) => {
  $("workers").replaceChildren(...status.workers.map(card));
  const lines = status.workers.flatMap((worker) => (worker.requests || []).map((request) => row(worker, request)));
  $("requests").replaceChildren(...lines);
  $("table").hidden = !lines.length;
  $("idle").hidden = lines.length > 0;
  const ready = status.workers.filter((worker) => worker.state === "ready").length;
  $("summary").textContent = `${ready} of ${status.workers.length} ${status.workers.length === 1 ? "worker" : "workers"} ready`;
  document.body.dataset.ready = ready;
};

const refresh = async () => {
  try {
    const answer = await call("/status");
    if (answer.ok) show(await answer.json());
  } catch {
    $("summary").textContent = UNREACHABLE;
    document.body.dataset.ready = 0;
  }
};

follow(() => 1000);
