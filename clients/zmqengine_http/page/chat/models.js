// The models of this server: which one answers, its state, and loading and unloading where a launcher does that.
let models = [];
let reachable = true;
let ready = 0;

const chosen = () => models.find((model) => model.id === settings.model) || null;
const stateOf = (model) => (model.status ? model.status.value : "loaded");
const progressOf = (model) => (model.status && model.status.progress != null ? Math.round(100 * model.status.progress) : null);
const reasonOf = (model) => (model.zmqengine || {}).never || (model.status && model.status.failed ? model.zmqengine.message || "it failed to load" : "");
const abilities = (model) => model.capabilities || (model.zmqengine || {}).capabilities || [];
const loading = (model) => stateOf(model) === "loading";

const stateWords = (model) => {
  if (reasonOf(model)) return "cannot be loaded";
  if (loading(model)) return `loading${progressOf(model) == null ? "" : ` ${progressOf(model)} %`}`;
  if (stateOf(model) === "unloaded") return model.zmqengine.waiting ? "waits for memory" : "not loaded";
  return ready || model.status ? "ready" : "no worker is ready";
};

const factsOf = (model) => {
  const facts = [], can = abilities(model);
  const bytes = (model.zmqengine || {}).need_bytes;
  if (bytes) facts.push(size(bytes));
  if (model.max_model_len) facts.push(`${model.max_model_len.toLocaleString("en")} tokens of context`);
  if (can.includes("vision")) facts.push("sees pictures");
  if (can.includes("thinking")) facts.push("thinks");
  return facts;
};

// What a user has to know before a question, in a sentence; nothing if the chosen model just answers.
const notice = () => {
  const model = chosen();
  if (!reachable) return UNREACHABLE;
  if (!model) return "No model yet. Start one with: zmqengine serve";
  if (reasonOf(model)) return `${model.id} cannot be loaded: ${reasonOf(model)}`;
  if (loading(model)) return `${model.id} is loading: ${model.zmqengine.stage || "it starts"}${progressOf(model) == null ? "" : `, ${progressOf(model)} %`}`;
  if (stateOf(model) === "unloaded") return model.zmqengine.waiting ? `${model.id} waits until other models leave it their memory.` : `${model.id} will be loaded for the first question.`;
  return ready ? "" : "No worker is ready: answers wait for one.";
};

const dot = (model) => element("span", "", `dot ${reasonOf(model) ? "failed" : stateOf(model)}`);

const command = async (path, model) => {
  try {
    const answer = await postJson(path, { model: model.id });
    if (!answer.ok) throw new Error(await failure(answer));
  } catch (error) { toast(error.message); }
  refresh();
};

const loadButton = (model) => {
  const loaded = stateOf(model) !== "unloaded";
  const node = iconButton("power", `${loaded ? "Unload" : "Load"} ${model.id}`, () => command(loaded ? "models/unload" : "models/load", model));
  node.classList.toggle("on", loaded);
  return node;
};

const choose = (model) => {
  settings.model = model.id;
  keepSettings();
  showModels();
};

const modelRow = (model) => {
  const line = element("li");
  const row = button("", () => {
    choose(model);
    $("models").hidePopover();
    focusText();
  });
  row.className = "choice";
  row.disabled = reasonOf(model) !== "";
  if (model.id === settings.model) row.setAttribute("aria-current", "true");
  const words = element("span", "", "words");
  words.append(element("strong", model.id), element("small", [stateWords(model), ...factsOf(model)].join(" · ")));
  if (reasonOf(model)) words.append(element("small", reasonOf(model), "error"));
  row.append(dot(model), words);
  if (model.id === settings.model) row.append(icon("check"));
  line.append(row);
  if (model.status && !(model.zmqengine || {}).never) line.append(loadButton(model));
  if (loading(model)) {
    const bar = element("progress");
    bar.max = 100;
    if (progressOf(model) != null) bar.value = progressOf(model);
    bar.setAttribute("aria-label", `Loading ${model.id}`);
    line.append(bar);
  }
  return line;
};

// The first answer is the soonest from a model that is loaded; then from the one that was loaded most often.
const chooseFirst = () => {
  const usable = models.filter((model) => !reasonOf(model));
  if (usable.some((model) => model.id === settings.model)) return;
  const rank = (model) => (stateOf(model) === "loaded" ? Infinity : (model.zmqengine || {}).loads || 0);
  const first = usable.reduce((best, model) => (!best || rank(model) > rank(best) ? model : best), null);
  if (first) settings.model = first.id;
};

const showLoad = (model) => {
  const busy = model && reachable && loading(model);
  $("load-progress").hidden = !busy;
  if (busy && progressOf(model) != null) $("load-progress").value = progressOf(model);
  else $("load-progress").removeAttribute("value");
  $("load-now").hidden = !(model && reachable && model.status && !reasonOf(model) && stateOf(model) === "unloaded" && !model.zmqengine.waiting);
};

const showDefaults = (model) => {
  const defaults = model && model.sampling_defaults;
  for (const [name, field] of Object.entries(SAMPLING)) {
    if (field.type !== "object") $(name).placeholder = defaults ? defaults[name] ?? field.default : "the model's";
  }
  // Whether a model that is not loaded thinks is not known.
  const thinks = !model || !model.capabilities || model.capabilities.includes("thinking");
  for (const name of ["effort", "thinking-field"]) $(name).hidden = !thinks;
};

const showList = () => {
  const list = $("model-list"), before = [...list.querySelectorAll("button")].indexOf(document.activeElement);
  list.replaceChildren(...models.map(modelRow));
  if (before >= 0) [...list.querySelectorAll("button")][before]?.focus();
};

let shown = "";
const showModels = () => {
  chooseFirst();
  // Elements that a user may be pointing at stay as long as they are true.
  const now = JSON.stringify([models, settings.model, ready, reachable]);
  if (now === shown) return;
  shown = now;
  const model = chosen();
  $("model").replaceChildren(...(model ? [dot(model)] : []), element("span", model ? model.id : "No model"), icon("chevron-down"));
  $("model").setAttribute("aria-label", model ? `Model: ${model.id}, ${stateWords(model)}` : "No model");
  $("summary").textContent = notice();
  $("notice").hidden = !notice();
  $("notice").classList.toggle("bad", !reachable || !model || reasonOf(model) !== "");
  showList();
  showLoad(model);
  showDefaults(model);
  showWelcome();
  showContext();
};

const refresh = async () => {
  try {
    const answer = await call("v1/models");
    if (answer.ok) {
      // An alias is for programs: here it would be a second line of the same model. What cannot chat is no choice.
      models = (await answer.json()).data.filter((model) => (!model.zmqengine || model.id === model.root) && abilities(model).includes("completion"));
      models.sort((a, b) => (reasonOf(a) !== "") - (reasonOf(b) !== "") || a.id.localeCompare(b.id));
    }
    const state = await call("ready");
    ready = state.ok ? (await state.json()).workers.filter((worker) => worker.ready).length : 0;
    reachable = true;
  } catch {
    reachable = false;
    ready = 0;
  }
  showModels();
  document.body.dataset.ready = ready;
};

const startModels = () => {
  $("load-now").addEventListener("click", () => command("models/load", chosen()));
  $("model").addEventListener("click", () => $("models").togglePopover());
  // Below the button, as far as the window has room.
  const align = () => {
    const widest = Math.min(432, innerWidth - 16);
    $("models").style.left = `${Math.max(8, Math.min($("model").getBoundingClientRect().left, innerWidth - widest - 8))}px`;
  };
  $("models").addEventListener("beforetoggle", align);
  addEventListener("resize", align);
  $("models").addEventListener("toggle", (e) => {
    $("model").setAttribute("aria-expanded", e.newState === "open");
    if (e.newState === "open") $("model-list").querySelector("[aria-current], button")?.focus();
  });
};
