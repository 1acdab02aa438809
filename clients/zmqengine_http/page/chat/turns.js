// The conversation: each message as a turn, with what can be done to it.
const ENDS = {
  stop: "", tool_calls: "", length: "Cut: the longest answer was reached.", stopped: "Stopped by you.",
  interrupted: "Cut off: the page was closed or the connection lost.",
};
// A shorter time tells more of the clock than of the model.
const RATE_MS_MIN = 100;
// What some models write where the server has no name for their thinking.
const RAW_THINKING = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;
const PARTS = ["content", "reasoning", "finish", "error", "usage", "timings", "first_ms", "model", "ignored"];

const fence = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((ticks) => ticks[0].length + 1)));
const images = (message) => (message.files || []).filter((file) => file.url);
const withFiles = (message) => (message.files || []).filter((file) => !file.url).map((file) => `${file.name}:\n${fence(file.text)}\n${file.text}\n${fence(file.text)}\n\n`).join("") + message.content;

// The speed is that of the worker: what arrives here may have waited on the way and come at once.
const figures = (message) => {
  const usage = message.usage;
  if (!usage) return "";
  const parts = [many(usage.completion_tokens, "token")];
  const times = message.timings;
  if (times && times.predicted_ms >= RATE_MS_MIN && usage.completion_tokens > 1) {
    parts.push(`${(1000 * (usage.completion_tokens - 1) / times.predicted_ms).toPrecision(3)} tokens/s`);
  }
  parts.push(`first after ${(message.first_ms / 1000).toFixed(1)} s`);
  parts.push(`prompt ${usage.prompt_tokens.toLocaleString("en")} (${(usage.prompt_tokens_details || {}).cached_tokens || 0} cached)`);
  return parts.join(" · ");
};

const thinkingOf = (message) => {
  const raw = message.reasoning ? null : RAW_THINKING.exec(message.content);
  return raw ? [raw[1].trim(), message.content.slice(raw[0].length)] : [(message.reasoning || "").trim(), message.content];
};

const drawThinking = (box, text, ended) => {
  let thinking = box.querySelector(".thinking");
  if (!thinking) {
    thinking = element("details", "", "thinking");
    thinking.append(element("summary"), element("div"));
    thinking.lastChild.tabIndex = 0;
    box.prepend(thinking);
  }
  thinking.classList.toggle("live", !ended);
  thinking.firstChild.replaceChildren(icon("brain"), ended ? `Thought, ${many(text.split(/\s+/).length, "word")}` : "Thinking...");
  if (thinking.lastChild.textContent !== text) thinking.lastChild.textContent = text;
};

const drawAnswer = (box, message) => {
  const [thinking, text] = thinkingOf(message);
  if (thinking) drawThinking(box, thinking, Boolean(text || message.finish));
  let answer = box.querySelector(".answer");
  if (!answer) {
    answer = element("div", "", "answer");
    box.append(answer);
  }
  showMarkdown(answer, text);
  const waits = !text && !thinking && !message.finish;
  if (waits !== Boolean(box.querySelector(".waits"))) {
    if (waits) box.append(element("span", "", "waits"));
    else box.querySelector(".waits").remove();
  }
};

const picture = (file) => {
  const node = element("img", "", "picture");
  node.src = file.url;
  node.alt = file.name;
  return node;
};

const drawFile = (file) => {
  if (file.url) return picture(file);
  const node = element("details", "", "file");
  const summary = element("summary");
  summary.append(icon("file-text"), file.name);
  node.append(summary, element("pre", file.text));
  node.lastChild.tabIndex = 0;
  return node;
};

const drawError = (message, index) => {
  const box = element("div", "", "error");
  box.setAttribute("role", "alert");
  box.append(icon("circle-alert"), element("span", message.error));
  const last = index === chat.messages.length - 1;
  if (last) box.append(button("Try again", () => (message.role === "user" ? generate() : regenerate(index))));
  return box;
};

const draw = (message, index) => {
  const turn = element("article", "", `turn ${message.role}`);
  turn.setAttribute("aria-label", message.role === "user" ? "You" : `Answer${message.model ? ` of ${message.model}` : ""}`);
  const body = element("div", "", "body");
  if (message.role === "user") {
    turn.append(...(message.files || []).map(drawFile));
    body.textContent = message.content;
  } else {
    if (message.model) turn.append(element("div", message.model, "by"));
    drawAnswer(body, message);
  }
  turn.append(body);
  if (ENDS[message.finish] && !message.error) turn.append(element("p", ENDS[message.finish], "cut"));
  if (message.ignored) turn.append(element("p", `This model has no use for: ${message.ignored}.`, "note"));
  if (message.error) turn.append(drawError(message, index));
  turn.append(tools(message, index));
  return turn;
};

const tools = (message, index) => {
  const bar = element("div", "", "tools");
  if (running.get(chat)?.message === message) return bar;
  const last = index === chat.messages.length - 1;
  if (message.role === "user") {
    bar.append(copyButton("Copy this message", () => message.content), iconButton("pencil", "Edit this message", () => edit(index)));
    if (last && !message.error) bar.append(iconButton("refresh-cw", "Try again", () => generate()));
    return bar;
  }
  if (last && message.finish !== "stop" && (message.content || message.reasoning)) {
    const node = button("Continue", () => generate({ continues: true }), "Continue this answer");
    node.prepend(icon("play"));
    bar.append(node);
  }
  bar.append(copyButton("Copy this answer", () => message.content), iconButton("refresh-cw", "Regenerate", () => regenerate(index)));
  const versions = message.versions || [];
  if (last && versions.length > 1) {
    const at = message.version;
    bar.append(iconButton("chevron-left", "Earlier answer", () => turnTo(message, at - 1)), element("span", `${at + 1}/${versions.length}`), iconButton("chevron-right", "Later answer", () => turnTo(message, at + 1)));
  }
  bar.append(element("span", figures(message), "figures"));
  return bar;
};

const snapshot = (message) => Object.fromEntries(PARTS.map((name) => [name, message[name]]));

const turnTo = (message, to) => {
  const version = (to + message.versions.length) % message.versions.length;
  message.versions[message.version] = snapshot(message);
  Object.assign(message, message.versions[version], { version });
  showLast();
  keep();
};

// --- scrolling -----------------------------------------------------------------------------------------------

const atEnd = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
const toEnd = () => { $("talk").scrollTop = $("talk").scrollHeight; };
const showJump = () => { $("jump").hidden = atEnd(); };

// The end stays in sight when the room for the conversation changes, as with the keyboard of a phone.
const followEnd = () => {
  let end = true;
  $("talk").addEventListener("scroll", () => { end = atEnd(); showJump(); }, { passive: true });
  new ResizeObserver(() => { if (end) toEnd(); }).observe($("talk"));
  $("jump").addEventListener("click", toEnd);
};

const showAll = () => {
  $("turns").replaceChildren(...chat.messages.map(draw));
  showWelcome();
  showContext();
  toEnd();
  showTip(null);
};

// The last turn again, and the one before it, whose buttons depend on its place. An error is brought into sight.
const showLast = () => {
  const turns = $("turns"), end = atEnd();
  const from = Math.max(0, chat.messages.length - 2);
  while (turns.children.length > from) turns.lastChild.remove();
  turns.append(...chat.messages.slice(from).map((message, place) => draw(message, from + place)));
  showWelcome();
  showContext();
  if (end || turns.querySelector(".turn:last-child .error")) toEnd();
  showJump();
};

// --- another question, another answer ------------------------------------------------------------------------

// A copy of the chat as it is, before a change drops its end.
const fork = async () => {
  const copy = { ...structuredClone(chat), id: fresh().id, title: `${titleOf(chat)} (earlier)` };
  chats.push(copy);
  await store.keep(copy);
};

const edit = (index) => {
  if (running.has(chat)) return;
  const message = chat.messages[index];
  const turn = $("turns").children[index];
  const field = element("textarea");
  field.setAttribute("aria-label", "Edit this message");
  field.value = message.content;
  const bar = element("div", "", "buttons");
  const cancel = () => { turn.replaceWith(draw(message, index)); focusText(); };
  const ask = async () => {
    if (index < chat.messages.length - 1) await fork();
    Object.assign(message, { content: field.value, error: "" });
    chat.messages.length = index + 1;
    showAll();
    generate();
    focusText();
  };
  const send = button("Send", ask);
  send.className = "primary";
  bar.append(button("Cancel", cancel), send);
  field.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { e.stopPropagation(); cancel(); }
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); ask(); }
  });
  const box = element("div", "", "editing");
  box.append(field, bar);
  turn.replaceChildren(box);
  fit(field);
  field.focus();
};

const regenerate = async (index) => {
  if (running.has(chat)) return;
  const message = chat.messages[index];
  if (index < chat.messages.length - 1) {
    await fork();
    chat.messages.length = index + 1;
  }
  message.versions = message.versions || [snapshot(message)];
  message.versions[message.version || 0] = snapshot(message);
  message.version = message.versions.length;
  message.versions.push({});
  Object.assign(message, Object.fromEntries(PARTS.map((name) => [name, undefined])), { content: "", reasoning: "" });
  showAll();
  generate({ again: true });
};
