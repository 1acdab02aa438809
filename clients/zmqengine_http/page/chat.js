// The chat: one conversation shown, many kept.
const FILE_BYTES_MAX = 512 * 1024; // More text than any context here takes.
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const IMAGE_BYTES_MAX = 1024 * 1024; // A larger image is scaled: it goes along with every turn.
const IMAGE_SIDE_MAX = 2048;
const DRAW_MS = 100; // A long answer is parsed again each time.
const KEEP_MS = 1000; // What a reload in mid-answer may lose.
const FIELDS = ["temperature", "top_p", "max_tokens", "seed"];
let chats = [];
let chat = null;
let running = null;
let attached = [];
let models = [];

const fresh = () => ({ id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), title: "", updated: Date.now(), system: "", messages: [] });
const say = (text) => { $("news").textContent = text; };
const titleOf = (each) => each.title || "New chat";

const keep = async () => {
  chat.updated = Date.now();
  if (!chat.title) {
    const first = chat.messages.find((message) => message.role === "user");
    chat.title = first ? first.content.trim().slice(0, 60) || "Attached file" : "";
  }
  if (!chats.includes(chat)) chats.unshift(chat);
  try { await store.keep(chat); } catch (error) { say(`This browser does not keep the chat: ${error.message}`); }
};

// --- the list of chats ---------------------------------------------------------------------------------------

const showList = () => {
  chats.sort((a, b) => b.updated - a.updated);
  $("list").replaceChildren(...chats.map((each) => {
    const line = element("li");
    const open = button(titleOf(each), () => openChat(each));
    if (each === chat) open.setAttribute("aria-current", "true");
    const drop = button("×", async () => {
      if (!confirm(`Delete "${titleOf(each)}"?`)) return;
      if (each === chat && running) running.abort();
      chats = chats.filter((other) => other !== each);
      await store.drop(each.id);
      if (each === chat) openChat(chats[0] || fresh());
      else showList();
    }, `Delete ${titleOf(each)}`);
    drop.className = "delete";
    line.append(open, drop);
    return line;
  }));
};

const openChat = (each) => {
  if (running) running.abort();
  chat = each;
  $("system").value = chat.system;
  localStorage.setItem("zmqengine-chat", chat.id);
  listing(false);
  showAll();
  showList();
  $("text").focus();
};

const listing = (open) => {
  $("app").classList.toggle("listing", open);
  $("menu").setAttribute("aria-expanded", open);
};

const asText = (each) => `# ${titleOf(each)}\n\n` + (each.system ? `**System**\n\n${each.system}\n\n` : "") + each.messages.map((message) =>
  `**${message.role === "user" ? "You" : "Model"}**\n\n${withFiles(message)}`).join("\n\n") + "\n";

// A copy of the chat as it is, before a change drops its end.
const fork = async () => {
  const copy = { ...structuredClone(chat), id: fresh().id, title: `${titleOf(chat)} (earlier)` };
  chats.push(copy);
  await store.keep(copy);
};

// --- messages ------------------------------------------------------------------------------------------------

const fence = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((found) => found[0].length + 1)));
const images = (message) => (message.files || []).filter((file) => file.url);
const withFiles = (message) => (message.files || []).filter((file) => !file.url).map((file) => `${file.name}:\n${fence(file.text)}\n${file.text}\n${fence(file.text)}\n\n`).join("") + message.content;

const ENDS = {
  stop: "", tool_calls: "", length: "Cut: the longest answer was reached.", stopped: "Stopped by you.",
  interrupted: "Cut off: the page was closed or the connection lost.",
};

const figures = (message) => {
  const usage = message.usage;
  if (!usage) return "";
  const rate = message.seconds > 0 && usage.completion_tokens > 1 ? `, ${((usage.completion_tokens - 1) / message.seconds).toFixed(1)} tokens/s` : "";
  return `${many(usage.completion_tokens, "token")}${rate}, first after ${(message.first_ms / 1000).toFixed(1)} s, `
    + `prompt ${usage.prompt_tokens} (${(usage.prompt_tokens_details || {}).cached_tokens || 0} cached)`;
};

const drawAnswer = (box, message) => {
  const parts = [];
  if (message.reasoning) {
    const old = box.querySelector(".thinking");
    const thinking = element("details", "", "thinking");
    thinking.open = old ? old.open : false;
    const length = message.reasoning.trim().split(/\s+/).length;
    thinking.append(element("summary", message.content || message.finish ? `Thought, ${many(length, "word")}` : "Thinking..."), element("div", message.reasoning.trim()));
    parts.push(thinking);
  }
  const answer = element("div", "", "answer");
  answer.append(markdown(message.content));
  parts.push(answer);
  box.replaceChildren(...parts);
};

const draw = (message, index) => {
  const turn = element("article", "", `turn ${message.role}`);
  turn.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  const body = element("div", "", "body");
  turn.append(body);
  if (message.role === "user") {
    for (const file of message.files || []) {
      if (file.url) {
        turn.insertBefore(picture(file), body);
        continue;
      }
      const shown = element("details", "", "file");
      shown.append(element("summary", file.name), element("pre", file.text));
      turn.insertBefore(shown, body);
    }
    body.textContent = message.content;
  } else drawAnswer(body, message);
  if (message.error) turn.append(element("p", message.error, "error"));
  turn.append(tools(message, index));
  return turn;
};

const picture = (file) => {
  const shown = element("img", "", "picture");
  shown.src = file.url;
  shown.alt = file.name;
  return shown;
};

const tools = (message, index) => {
  const bar = element("div", "", "tools");
  if (running && running.message === message) return bar;
  const last = index === chat.messages.length - 1;
  if (message.role === "user") {
    bar.append(button("Edit", () => edit(index), "Edit this message"));
    if (last) bar.append(button("Try again", () => generate()));
    return bar;
  }
  if (ENDS[message.finish]) bar.append(element("span", ENDS[message.finish], "cut"));
  if (last && message.finish !== "stop" && (message.content || message.reasoning)) bar.append(button("Continue", () => generate({ continues: true }), "Continue this answer"));
  bar.append(button("Copy", async (e) => { e.target.textContent = (await copied(message.content)) ? "Copied" : "Not copied"; }, "Copy this answer"));
  bar.append(button(message.error && !message.content ? "Try again" : "Regenerate", () => regenerate(index)));
  const versions = message.versions || [];
  if (last && versions.length > 1) {
    const at = message.version;
    bar.append(button("Earlier", () => turnTo(message, at - 1), "Earlier answer"), element("span", `${at + 1}/${versions.length}`), button("Later", () => turnTo(message, at + 1), "Later answer"));
  }
  bar.append(element("span", figures(message), "figures"));
  return bar;
};

const PARTS = ["content", "reasoning", "finish", "error", "usage", "seconds", "first_ms"];
const snapshot = (message) => Object.fromEntries(PARTS.map((name) => [name, message[name]]));

const turnTo = (message, at) => {
  const place = (at + message.versions.length) % message.versions.length;
  message.versions[message.version] = snapshot(message);
  Object.assign(message, message.versions[place], { version: place });
  showLast();
  keep();
};

const showAll = () => {
  $("talk").replaceChildren(...chat.messages.map(draw));
  $("talk").scrollTop = $("talk").scrollHeight;
  showTip(null);
};

// The last turn again, and the one before it, whose buttons depend on its place.
const showLast = () => {
  const talk = $("talk");
  const low = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  const from = Math.max(0, chat.messages.length - 2);
  while (talk.children.length > from) talk.lastChild.remove();
  talk.append(...chat.messages.slice(from).map((message, place) => draw(message, from + place)));
  if (low) talk.scrollTop = talk.scrollHeight;
};

const edit = (index) => {
  if (running) return;
  const message = chat.messages[index];
  const turn = $("talk").children[index];
  const label = element("label", "", "editing");
  const field = element("textarea");
  field.setAttribute("aria-label", "Edit this message");
  field.value = message.content;
  field.rows = 4;
  label.append(field);
  const bar = element("div", "", "buttons");
  const cancel = () => turn.replaceWith(draw(message, index));
  const send = button("Send", async () => {
    if (index < chat.messages.length - 1) await fork();
    message.content = field.value;
    chat.messages.length = index + 1;
    showAll();
    generate();
  });
  send.className = "primary";
  bar.append(send, button("Cancel", cancel));
  field.addEventListener("keydown", (e) => { if (e.key === "Escape") { e.stopPropagation(); cancel(); } });
  turn.replaceChildren(label, bar);
  field.focus();
};

const regenerate = async (index) => {
  if (running) return;
  const message = chat.messages[index];
  if (index < chat.messages.length - 1) {
    await fork();
    chat.messages.length = index + 1;
  }
  message.versions = message.versions || [snapshot(message)];
  message.versions[message.version || 0] = snapshot(message);
  message.version = message.versions.length;
  message.versions.push({});
  Object.assign(message, { content: "", reasoning: "", finish: null, error: "", usage: null });
  showAll();
  generate({ again: true });
};

// --- asking --------------------------------------------------------------------------------------------------

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      // An error after the keep-alives of a wait has a line with its kind in front.
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield data === "data: [DONE]" ? null : JSON.parse(data.slice(6));
    }
  }
}

const withImages = (message) => {
  const parts = images(message).map((file) => ({ type: "image_url", image_url: { url: file.url } }));
  return parts.length ? [...parts, { type: "text", text: withFiles(message) }] : withFiles(message);
};

const requestBody = (messages, continues) => {
  const plain = messages.map((message) => message.role === "user"
    ? { role: "user", content: withImages(message) } : { role: "assistant", content: message.content });
  if (continues) {
    const last = messages[messages.length - 1];
    if (last.reasoning) plain[plain.length - 1].reasoning_content = last.reasoning;
  }
  const wanted = {
    messages: chat.system.trim() ? [{ role: "system", content: chat.system.trim() }, ...plain] : plain,
    stream: true, stream_options: { include_usage: true },
  };
  if (continues) Object.assign(wanted, { continue_final_message: true, add_generation_prompt: false });
  // A field that was left empty is the model's own default.
  for (const name of FIELDS) if ($(name).value !== "") wanted[name] = Number($(name).value);
  if ($("model").value) wanted.model = $("model").value;
  if ($("logprobs").checked) Object.assign(wanted, { logprobs: true, top_logprobs: 5 });
  return JSON.stringify(wanted);
};

const busy = () => {
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("talk").setAttribute("aria-busy", running !== null);
};

// Ask for an answer to the conversation; `continues` goes on with the last one, `again` fills it anew.
const generate = async ({ continues = false, again = false } = {}) => {
  if (running) return;
  const here = chat;
  if (!continues && !again) here.messages.push({ role: "assistant", content: "", reasoning: "", finish: null, error: "" });
  const message = here.messages[here.messages.length - 1];
  const asked = continues ? here.messages : here.messages.slice(0, -1);
  const body = requestBody(asked, continues);
  const stop = new AbortController();
  running = { message, abort: () => stop.abort() };
  Object.assign(message, { finish: null, error: "" });
  busy();
  say("");
  showLast();
  const turn = () => (chat === here ? $("talk").lastElementChild : null);
  const marked = $("logprobs").checked ? element("div", "", "tokens") : null;
  if (marked && continues) marked.append(message.content);
  const started = performance.now();
  let first = 0, drawn = 0, kept = started, ended = false;
  const redraw = () => {
    const now = turn();
    if (!now) return;
    const talk = $("talk");
    const low = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    const box = now.querySelector(".body");
    if (!marked) drawAnswer(box, message);
    else if (marked.parentNode !== box) box.replaceChildren(marked);
    if (low) talk.scrollTop = talk.scrollHeight;
    drawn = performance.now();
  };
  await keep();
  showList();
  try {
    const answer = await call("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body, signal: stop.signal,
    });
    if (!answer.ok) throw new Error(await failure(answer));
    for await (const event of events(answer)) {
      if (event === null) { ended = true; continue; }
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices && event.choices[0];
      if (event.usage) message.usage = event.usage;
      if (!choice) continue;
      const delta = choice.delta || {};
      const text = (delta.reasoning_content || "") + (delta.content || "");
      if (text && !first) first = performance.now();
      message.reasoning = (message.reasoning || "") + (delta.reasoning_content || "");
      message.content += delta.content || "";
      if (marked) marked.append(...tokens((choice.logprobs && choice.logprobs.content) || [], text));
      if (choice.finish_reason) message.finish = choice.finish_reason;
      if (performance.now() - drawn > DRAW_MS) redraw();
      if (performance.now() - kept > KEEP_MS) { kept = performance.now(); keep(); }
    }
    if (!ended) throw new Error("The connection was lost before the answer's end.");
  } catch (error) {
    message.finish = error.name === "AbortError" ? "stopped" : "interrupted";
    if (error.name !== "AbortError") message.error = error.message;
  }
  message.first_ms = (first || performance.now()) - started;
  message.seconds = first ? (performance.now() - first) / 1000 : 0;
  running = null;
  if (!message.content && !message.reasoning && !again && !continues) {
    // Nothing came: the question stays, with the reason and a button to ask again.
    here.messages.pop();
    const question = here.messages[here.messages.length - 1];
    if (question) question.error = message.error;
  } else {
    const question = here.messages[here.messages.length - 2];
    if (question) question.error = "";
  }
  const shown = chat;
  chat = here;
  await keep();
  chat = shown;
  if (chat === here) {
    showLast();
    if (marked && turn()) turn().querySelector(".body").replaceChildren(marked);
    say(message.error ? `Failed: ${message.error}` : ENDS[message.finish] || "The answer is complete.");
  }
  showList();
  busy();
};

const send = () => {
  const text = $("text").value;
  if ((!text.trim() && !attached.length) || running) return;
  chat.messages.push({ role: "user", content: text, files: attached });
  $("text").value = "";
  attached = [];
  showAttached();
  showLast();
  $("talk").scrollTop = $("talk").scrollHeight;
  generate();
  $("text").focus();
};

// --- attached files ------------------------------------------------------------------------------------------

const showAttached = () => {
  $("attached").replaceChildren(...attached.map((file, place) => {
    const drop = button(`${file.name} ×`, () => {
      attached.splice(place, 1);
      showAttached();
    }, `Do not attach ${file.name}`);
    if (file.url) drop.prepend(picture(file));
    return drop;
  }));
};

const dataUrl = (blob) => new Promise((go, fail) => {
  const reader = new FileReader();
  reader.onload = () => go(reader.result);
  reader.onerror = () => fail(reader.error);
  reader.readAsDataURL(blob);
});

// The image as a data URL, smaller if it is large.
const imageUrl = async (file) => {
  if (file.size <= IMAGE_BYTES_MAX) return dataUrl(file);
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, IMAGE_SIDE_MAX / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
};

const attach = async (files) => {
  for (const file of files) {
    if (IMAGE_TYPES.includes(file.type)) {
      try { attached.push({ name: file.name || "image", url: await imageUrl(file) }); } catch { say(`${file.name} is no image that this browser can read.`); }
      continue;
    }
    const text = file.size <= FILE_BYTES_MAX ? await file.text() : "";
    if (file.size > FILE_BYTES_MAX) say(`${file.name} is longer than ${FILE_BYTES_MAX / 1024} KB.`);
    else if (text.includes("\0") || text.includes("\ufffd")) say(`${file.name} is neither text nor an image (PNG, JPEG, WebP, GIF).`);
    else attached.push({ name: file.name, text });
  }
  showAttached();
  $("attached").append(element("span", $("news").textContent));
};

// --- options -------------------------------------------------------------------------------------------------

const showPresets = () => {
  const choose = element("option", settings.presets.length ? "choose" : "none yet");
  choose.value = "";
  $("presets").replaceChildren(choose, ...settings.presets.map((text) => {
    const option = element("option", text.slice(0, 50));
    option.value = text;
    return option;
  }));
};

const takeSystem = () => {
  chat.system = $("system").value;
  if (chat.messages.length) keep();
};

const size = (bytes) => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${Math.ceil(bytes / 2 ** 20)} MiB`;

// The state of a model that a launcher loads on demand; any other is loaded.
const stateOf = (model) => model.status ? model.status.value : "loaded";
const done = (model) => model.status && model.status.progress != null ? ` ${Math.round(100 * model.status.progress)} %` : "";
const reason = (model) => (model.zmqengine || {}).never || (model.status && model.status.failed ? model.zmqengine.message || "it failed to load" : "");

const labelOf = (model) => {
  if (reason(model)) return `${model.id} (cannot be loaded)`;
  if (stateOf(model) === "unloaded") return `${model.id} (not loaded, needs ${size(model.zmqengine.need_bytes)})`;
  return stateOf(model) === "loaded" ? model.id : `${model.id} (${stateOf(model)}${done(model)})`;
};

const summaryOf = (model) => {
  if (reason(model)) return `${model.id} cannot be loaded: ${reason(model)}`;
  if (stateOf(model) === "unloaded") return model.zmqengine.waiting ? `${model.id} waits until other models leave it their memory.` : `${model.id} will be loaded for the first question.`;
  return stateOf(model) === "loading" ? `${model.id} is loading: ${model.zmqengine.stage}${done(model)}` : "";
};

const showModels = () => {
  const select = $("model");
  const names = models.map((model) => model.id);
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...names.map((name) => {
      const option = element("option", name);
      option.value = name;
      return option;
    }));
    if (names.includes(settings.model)) select.value = settings.model;
  }
  models.forEach((model, place) => {
    const option = select.options[place], label = labelOf(model);
    if (option.textContent !== label) option.textContent = label;
    option.disabled = reason(model) !== "";
  });
  if (select.selectedIndex < 0 || select.selectedOptions[0].disabled) {
    const usable = models.filter((model) => !reason(model));
    const first = usable.find((model) => stateOf(model) === "loaded") || usable[0];
    if (first) select.value = first.id;
  }
  const chosen = models.find((model) => model.id === select.value) || {};
  const own = chosen.sampling_defaults || {};
  $("temperature").placeholder = own.temperature ?? "the model's";
  $("top_p").placeholder = own.top_p ?? "the model's";
};

const refresh = async () => {
  let ready = 0;
  try {
    const answer = await call("v1/models");
    if (answer.ok) {
      // An alias is for programs: here it would be a second line of the same model.
      const found = (await answer.json()).data.filter((model) => !model.zmqengine || model.id === model.root);
      if (found.length) models = found;
      showModels();
      const state = await call("ready");
      if (state.ok) ready = (await state.json()).workers.filter((worker) => worker.ready).length;
    }
    const chosen = models.find((model) => model.id === $("model").value);
    if (chosen && chosen.status) $("summary").textContent = summaryOf(chosen);
    else $("summary").textContent = ready ? "" : models.length ? "No worker is ready: answers wait for one." : "No model yet: start a worker, or wait until it has loaded.";
  } catch {
    $("summary").textContent = "The server does not answer.";
  }
  document.body.dataset.ready = ready;
};

// --- the page ------------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (e) => { e.preventDefault(); send(); });
$("text").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
});
document.addEventListener("keydown", (e) => { if (e.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running && running.abort());
$("new").addEventListener("click", () => openChat(fresh()));
$("menu").addEventListener("click", () => listing(!$("app").classList.contains("listing")));
$("export-text").addEventListener("click", () => saveFile(`${titleOf(chat).replace(/[^\w -]/g, "")}.md`, asText(chat), "text/markdown"));
$("export-all").addEventListener("click", () => saveFile("zmqengine-chats.json", JSON.stringify(chats, null, 1), "application/json"));
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => { await attach($("file").files); $("file").value = ""; });
$("text").addEventListener("paste", (e) => {
  if (!e.clipboardData.files.length) return;
  e.preventDefault();
  attach([...e.clipboardData.files]);
});
document.addEventListener("dragover", (e) => { if (e.dataTransfer.types.includes("Files")) e.preventDefault(); });
document.addEventListener("drop", (e) => {
  if (!e.dataTransfer.files.length) return;
  e.preventDefault();
  attach([...e.dataTransfer.files]);
});
$("system").addEventListener("input", takeSystem);
$("presets").addEventListener("change", () => {
  if (!$("presets").value) return;
  $("system").value = $("presets").value;
  takeSystem();
});
$("keep-preset").addEventListener("click", () => {
  const text = $("system").value.trim();
  if (text && !settings.presets.includes(text)) settings.presets.push(text);
  keepSettings();
  showPresets();
});
$("drop-preset").addEventListener("click", () => {
  settings.presets = settings.presets.filter((text) => text !== $("presets").value);
  keepSettings();
  showPresets();
});
for (const name of FIELDS) {
  $(name).value = settings[name] ?? "";
  $(name).addEventListener("change", () => { settings[name] = $(name).value; keepSettings(); });
}
$("logprobs").checked = Boolean(settings.logprobs);
$("logprobs").addEventListener("change", () => { settings.logprobs = $("logprobs").checked; keepSettings(); });
$("model").addEventListener("change", () => { settings.model = $("model").value; keepSettings(); showModels(); });

(async () => {
  showPresets();
  chat = fresh();
  follow(2000);
  try { chats = await store.all(); } catch (error) { say(`This browser keeps no chats: ${error.message}`); }
  // An answer without an end was being written when the page was closed.
  for (const message of chats.flatMap((each) => each.messages)) if (message.role === "assistant" && !message.finish) message.finish = "interrupted";
  const last = localStorage.getItem("zmqengine-chat");
  openChat(chats.find((each) => each.id === last) || chat);
  document.body.dataset.loaded = 1;
})();
