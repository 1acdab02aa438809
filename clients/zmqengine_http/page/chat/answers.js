// Asking the server, and the answer as it comes.
const DRAW_MS = 100; // A long answer is parsed again each time.
const KEEP_MS = 1000; // What a reload in mid-answer may lose.
const LOST = "The connection was lost before the answer's end.";
const running = new Map(); // The message that is being written in each chat, and how to stop it.

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

const requestOf = (here, message, continues) => {
  const messages = continues ? here.messages : here.messages.slice(0, -1);
  const plain = messages.map((message) => (message.role === "user"
    ? { role: "user", content: withImages(message) } : { role: "assistant", content: message.content }));
  const request = {
    messages: here.system.trim() ? [{ role: "system", content: here.system.trim() }, ...plain] : plain,
    stream: true, stream_options: { include_usage: true }, timings_per_token: true, ...optionFields(),
  };
  if (continues) {
    if (message.reasoning) plain[plain.length - 1].reasoning_content = message.reasoning;
    Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  }
  if (message.model) request.model = message.model;
  return request;
};

const showBusy = () => {
  const busy = running.has(chat);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("talk").setAttribute("aria-busy", busy);
};

// Ask for an answer to the conversation; `continues` goes on with the last one, `again` fills it anew. It goes on when
// another chat is opened.
const generate = async ({ continues = false, again = false } = {}) => {
  if (running.has(chat)) return;
  const here = chat;
  if (!continues && !again) here.messages.push({ role: "assistant", content: "", reasoning: "", finish: null, error: "" });
  const message = here.messages[here.messages.length - 1];
  const stop = new AbortController();
  running.set(here, { message, abort: () => stop.abort() });
  Object.assign(message, { finish: null, error: "", model: chosen() ? chosen().id : "" });
  showBusy();
  say("");
  showLast();
  const view = answerView(here, message, continues);
  await keep(here);
  showChats();
  try {
    await receive(requestOf(here, message, continues), message, view, stop.signal);
  } catch (error) {
    message.finish = error.name === "AbortError" ? "stopped" : "interrupted";
    // Browsers describe a broken connection in words of their own, which help no user.
    const lost = error instanceof TypeError || error.message === LOST;
    // A part of an answer is no failure: it is cut off, and continued. Firefox says so even of a page that is reloaded.
    const part = lost && (message.content || message.reasoning);
    if (message.finish === "interrupted" && !part) message.error = lost ? LOST : error.message;
  }
  running.delete(here);
  settle(here, message, { again, continues });
  await keep(here);
  if (chat === here) {
    showLast();
    view.end();
    say(message.error ? `Failed: ${message.error}` : ENDS[message.finish] || "The answer is complete.");
  }
  showChats();
  showBusy();
};

// Send the request and put what comes into the message. Raises for an answer that has no end.
const receive = async (request, message, view, signal) => {
  const started = performance.now();
  let kept = started, ended = false;
  const answer = await postJson("v1/chat/completions", request, { signal });
  if (!answer.ok) throw new Error(await failure(answer));
  message.ignored = answer.headers.get("x-ignored-fields") || "";
  for await (const event of events(answer)) {
    if (event === null) { ended = true; continue; }
    if (event.error) throw new Error(event.error.message);
    if (event.usage) Object.assign(message, { usage: event.usage, timings: event.timings });
    const choice = event.choices && event.choices[0];
    if (!choice) continue;
    const delta = choice.delta || {};
    const text = (delta.reasoning_content || "") + (delta.content || "");
    if (text && !view.begun) message.first_ms = performance.now() - started;
    message.reasoning = (message.reasoning || "") + (delta.reasoning_content || "");
    message.content += delta.content || "";
    if (choice.finish_reason) message.finish = choice.finish_reason;
    view.add(text, choice.logprobs && choice.logprobs.content);
    if (performance.now() - kept > KEEP_MS) { kept = performance.now(); keep(view.chat); }
  }
  if (!ended) throw new Error(LOST);
};

// The turn of an answer that grows: as Markdown, or as its tokens where their probabilities are shown.
const answerView = (here, message, continues) => {
  const marked = $("logprobs").checked ? element("div", "", "tokens") : null;
  if (marked && continues) marked.append(message.content);
  const turn = () => (chat === here ? $("turns").lastElementChild : null);
  let drawn = 0;
  const view = { chat: here, begun: false };
  view.draw = () => {
    if (!turn()) return;
    const end = atEnd(), box = turn().querySelector(".body");
    if (!marked) drawAnswer(box, message);
    else if (marked.parentNode !== box) box.replaceChildren(marked);
    if (end) toEnd();
    showJump();
    drawn = performance.now();
  };
  view.add = (text, entries) => {
    view.begun ||= text !== "";
    if (marked) marked.append(...tokens(entries || [], text));
    if (performance.now() - drawn > DRAW_MS) view.draw();
  };
  view.end = () => {
    if (marked && marked.childNodes.length && turn() && turn().classList.contains("assistant")) turn().querySelector(".body").replaceChildren(marked);
  };
  return view;
};

// Where nothing came, the question stays, with the reason and a button to ask again.
const settle = (here, message, { again, continues }) => {
  const empty = !message.content && !message.reasoning && !again && !continues;
  if (empty) here.messages.pop();
  const question = here.messages[here.messages.length - (empty ? 1 : 2)];
  if (question) question.error = empty ? message.error : "";
};
