"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const messages = [];
  const rates = new Map();
  let running = null;
  let key = sessionStorage.getItem("zmqengine-key") || "";

  // --- talking to the server ---------------------------------------------------------------------------

  const call = async (path, options = {}) => {
    const headers = { ...(options.headers || {}) };
    if (key) headers.authorization = `Bearer ${key}`;
    const answer = await fetch(path, { ...options, headers });
    if (answer.status === 401 && !$("ask").open) $("ask").showModal();
    return answer;
  };

  const failure = async (answer) => {
    try { return (await answer.json()).error.message; } catch { return `the server answered ${answer.status}`; }
  };

  $("ask").addEventListener("close", () => {
    key = $("key").value.trim();
    sessionStorage.setItem("zmqengine-key", key);
    refresh();
  });

  // --- the workers -------------------------------------------------------------------------------------

  const element = (kind, text = "", name = "") => {
    const made = document.createElement(kind);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  };

  const size = (bytes) => {
    for (const unit of ["", "K", "M", "G"]) {
      if (bytes < 999.5) return (unit && bytes < 10 ? bytes.toFixed(1) : bytes.toFixed(0)) + unit;
      bytes /= 1024;
    }
    return bytes.toFixed(1) + "T";
  };

  const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

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
    const title = element("h2");
    const progress = worker.progress && worker.progress.fraction != null && worker.state !== "ready"
      ? ` ${Math.round(100 * worker.progress.fraction)} %` : "";
    title.append(element("span", worker.state + progress, worker.state), ` · ${worker.model || "no model yet"} · ${worker.address}`);
    box.append(title);
    if (worker.state === "silent") {
      box.append(element("p", "No answer. Answers go on when the worker is back."));
      return box;
    }
    const n = worker.numbers;
    const made = rate(worker.address, worker, n.generated_tokens || 0);
    box.append(element("p", `${n.running || 0} running, ${n.queued || 0} waiting, ${made == null ? "-" : Math.round(made)} tokens/s, `
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
      box.append(element("p", `memory ${size(held)} of ${size(limit)}: ` + parts.map(([part, bytes]) => `${part.replaceAll("_", " ")} ${size(bytes)}`).join(", ")));
    }
    const prompts = (n.prompt_tokens || 0) + (n.cached_tokens || 0);
    box.append(element("p", `prompt cache ${many(n.prompt_cache_entries || 0, "prompt")}, ${size(n.prompt_cache_bytes || 0)}`
      + (prompts ? `, ${Math.round(100 * (n.cached_tokens || 0) / prompts)} % of prompt tokens from it` : "")
      + (n.pass_ms_p50 ? `, pass ${n.pass_ms_p50.toFixed(1)} ms` : "")));
    return box;
  };

  const row = (worker, request) => {
    const clients = new Map(worker.sessions.map((session) => [session.id, session.client || session.id]));
    const made = rate(`${worker.address}/${request.session}/${request.request}`, worker, request.output_tokens);
    const line = element("tr");
    const cells = [request.request, clients.get(request.session) || "", request.waits_for ? `waits: ${request.waits_for.split(":")[0]}` : request.phase,
      request.phase === "prefill" ? `${request.prefilled_tokens}/${request.prompt_tokens}` : request.prompt_tokens,
      `${request.output_tokens}/${request.max_tokens}`, made == null ? "" : Math.round(made), span(request.age_s)];
    cells.forEach((text, place) => line.append(element("td", String(text), place > 2 ? "n" : "")));
    line.firstChild.title = request.request;
    line.title = request.waits_for;
    return line;
  };

  const show = (status) => {
    $("workers").replaceChildren(...status.workers.map(card));
    const lines = status.workers.flatMap((worker) => (worker.requests || []).map((request) => row(worker, request)));
    $("requests").replaceChildren(...lines);
    const ready = status.workers.filter((worker) => worker.state === "ready").length;
    $("summary").textContent = `${ready} of ${status.workers.length} ${status.workers.length === 1 ? "worker" : "workers"} ready`;
    document.body.dataset.ready = ready;
    const names = [...new Set(status.workers.map((worker) => worker.model).filter(Boolean))].sort();
    const select = $("model");
    if (names.length && names.join() !== [...select.options].map((option) => option.value).join()) {
      const chosen = select.value;
      select.replaceChildren(...names.map((name) => { const option = element("option", name); option.value = name; return option; }));
      if (names.includes(chosen)) select.value = chosen;
    }
  };

  const refresh = async () => {
    try {
      const answer = await call("/status");
      if (answer.ok) show(await answer.json());
    } catch {
      $("summary").textContent = "the server does not answer";
      document.body.dataset.ready = 0;
    }
  };

  const follow = async () => {
    for (;;) {
      if (!document.hidden) await refresh();
      await new Promise((go) => setTimeout(go, 1000));
    }
  };

  // --- the chat ----------------------------------------------------------------------------------------

  const turn = (role, text = "") => {
    const box = element("div", text, `turn ${role}`);
    const talk = $("talk");
    talk.append(box);
    talk.scrollTop = talk.scrollHeight;
    return box;
  };

  const percent = (logprob) => {
    const share = 100 * Math.exp(logprob);
    return (share >= 10 ? share.toFixed(0) : share.toFixed(share >= 0.1 ? 1 : 3)).padStart(5) + " %";
  };

  const token = (entry) => {
    const made = element("span", entry.token, "token");
    made.tabIndex = -1;
    if (Math.exp(entry.logprob) < 0.5) made.classList.add("unsure");
    const lines = [`${percent(entry.logprob)}  ${JSON.stringify(entry.token)}`];
    for (const other of entry.top_logprobs || []) {
      if (other.token !== entry.token) lines.push(`${percent(other.logprob)}  ${JSON.stringify(other.token)}`);
    }
    made.dataset.tip = lines.join("\n");
    return made;
  };

  // What hovers is the text itself. Tokens that are parts of characters are shown as one, up to the next that is not.
  const tokens = (entries, text) => {
    const made = [];
    let parts = [], place = 0;
    const showParts = (end) => {
      if (end > place) made.push(parts.length ? token({ ...parts[0], token: text.slice(place, end) }) : text.slice(place, end));
      parts = [];
    };
    for (const entry of entries) {
      const at = !entry.token || entry.token.includes("\ufffd") ? -1 : text.indexOf(entry.token, place);
      if (at < 0) {
        parts.push(entry);
        continue;
      }
      showParts(at);
      made.push(token(entry));
      place = at + entry.token.length;
    }
    showParts(text.length);
    return made;
  };

  const showTip = (target) => {
    const tip = $("tip");
    const text = target && target.dataset ? target.dataset.tip : "";
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const place = target.getBoundingClientRect();
    const below = place.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${below ? place.bottom + 4 : Math.max(4, place.top - tip.offsetHeight - 4)}px`;
  };
  for (const event of ["mouseover", "focusin"]) $("talk").addEventListener(event, (e) => showTip(e.target));
  for (const event of ["mouseleave", "focusout", "scroll"]) $("talk").addEventListener(event, () => showTip(null));
  // The conversation takes the arrow keys: from token to token, as a mouse would hover.
  $("talk").addEventListener("keydown", (e) => {
    if (e.key !== "ArrowRight" && e.key !== "ArrowLeft") return;
    const tokens = [...$("talk").querySelectorAll(".token")];
    if (!tokens.length) return;
    const at = tokens.indexOf(document.activeElement);
    const next = at < 0 ? (e.key === "ArrowRight" ? 0 : tokens.length - 1) : at + (e.key === "ArrowRight" ? 1 : -1);
    const found = tokens[Math.max(0, Math.min(tokens.length - 1, next))];
    found.focus();
    e.preventDefault();
  });

  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  }

  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

  const body = () => {
    const system = $("system").value.trim();
    const wanted = {
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true, stream_options: { include_usage: true },
      temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    };
    if ($("model").value) wanted.model = $("model").value;
    if ($("logprobs").checked) Object.assign(wanted, { logprobs: true, top_logprobs: 5 });
    return JSON.stringify(wanted);
  };

  const busy = (now) => {
    running = now;
    $("send").disabled = now !== null;
    $("stop").disabled = now === null;
  };

  const take = (box, event) => {
    const choice = event.choices && event.choices[0];
    if (!choice) return "";
    const delta = choice.delta || {};
    const text = (delta.reasoning_content || "") + (delta.content || "");
    const entries = choice.logprobs && choice.logprobs.content;
    box.append(...tokens(entries || [], text));
    return delta.content || "";
  };

  const send = async () => {
    const text = $("text").value;
    if (!text.trim() || running) return;
    $("text").value = "";
    messages.push({ role: "user", content: text });
    turn("user", text);
    const box = turn("assistant");
    const talk = $("talk");
    const stop = new AbortController();
    busy(stop);
    const started = performance.now();
    let first = 0, said = "", usage = null;
    try {
      const answer = await call("/v1/chat/completions", {
        method: "POST", headers: { "content-type": "application/json" }, body: body(), signal: stop.signal,
      });
      if (!answer.ok) throw new Error(await failure(answer));
      for await (const event of events(answer)) {
        if (event.error) throw new Error(event.error.message);
        first = first || performance.now();
        const low = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
        said += take(box, event);
        if (event.usage) usage = event.usage;
        if (low) talk.scrollTop = talk.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") turn("error", error.message);
    } finally {
      busy(null);
      if (said) messages.push({ role: "assistant", content: said });
      else messages.pop();
      if (!said && !box.textContent) box.remove();
    }
    if (usage) {
      const seconds = (performance.now() - started) / 1000;
      const cached = (usage.prompt_tokens_details || {}).cached_tokens || 0;
      $("usage").textContent = `${usage.prompt_tokens} tokens of prompt (${cached} from the cache), first after `
        + `${Math.round(first - started)} ms, ${many(usage.completion_tokens, "token")} in ${seconds.toFixed(1)} s`;
    }
    $("text").focus();
  };

  $("form").addEventListener("submit", (e) => { e.preventDefault(); send(); });
  $("text").addEventListener("keydown", (e) => {
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
  });
  document.addEventListener("keydown", (e) => { if (e.key === "Escape" && running) running.abort(); });
  $("stop").addEventListener("click", () => running && running.abort());
  $("clear").addEventListener("click", () => {
    messages.length = 0;
    $("talk").replaceChildren();
    $("usage").textContent = "";
    showTip(null);
    $("text").focus();
  });

  follow();
})();
