// The message that is being written, its files, and how much of the context is used.
const FILE_BYTES_MAX = 512 * 1024; // More text than any context here takes.
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const IMAGE_BYTES_MAX = 1024 * 1024; // A larger image is scaled: it goes along with every turn.
const IMAGE_SIDE_MAX = 2048;
const TOUCH = matchMedia("(pointer: coarse)").matches;
let attached = [];

const fit = (field) => {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
};

const showComposer = () => {
  fit($("text"));
  $("send").disabled = !$("text").value.trim() && !attached.length;
};

const write = (text) => {
  $("text").value = text;
  showComposer();
  focusText();
};

// On glass the focus would open the keyboard over the conversation.
const focusText = () => { if (!TOUCH) $("text").focus(); };

const send = () => {
  const text = $("text").value;
  if ((!text.trim() && !attached.length) || running.has(chat)) return;
  chat.messages.push({ role: "user", content: text, files: attached });
  attached = [];
  showAttached();
  write("");
  showLast();
  toEnd();
  generate();
};

const stop = () => running.get(chat)?.abort();

// The tokens of the last answer and its prompt: what the next question will find used.
const showContext = () => {
  const last = chat && [...chat.messages].reverse().find((message) => message.usage);
  const most = (chosen() || {}).max_model_len;
  $("context").hidden = !last || !most;
  if ($("context").hidden) return;
  const used = last.usage.prompt_tokens + last.usage.completion_tokens;
  const share = Math.min(1, used / most);
  $("context").style.setProperty("--share", `${Math.round(360 * share)}deg`);
  $("context").classList.toggle("full", share > 0.9);
  const text = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens of context used`;
  $("context").title = text;
  $("context").setAttribute("aria-label", text);
};

// --- attached files ------------------------------------------------------------------------------------------

const showAttached = (problem = "") => {
  $("attached").replaceChildren(...attached.map((file, place) => {
    const chip = element("span", "", "chip");
    chip.append(file.url ? picture(file) : icon("file-text"), element("span", file.name), iconButton("x", `Do not attach ${file.name}`, () => {
      attached.splice(place, 1);
      showAttached();
      focusText();
    }));
    return chip;
  }));
  if (problem) $("attached").append(element("span", problem, "error"));
  $("attached").hidden = !$("attached").childNodes.length;
  showComposer();
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

// What there is to send of a file. Raises an error that says why there is nothing.
const contentOf = async (file) => {
  if (IMAGE_TYPES.includes(file.type)) {
    try { return { name: file.name || "image", url: await imageUrl(file) }; } catch { throw new Error(`${file.name} is no image that this browser can read.`); }
  }
  if (file.size > FILE_BYTES_MAX) throw new Error(`${file.name} is longer than ${FILE_BYTES_MAX / 1024} KiB.`);
  const text = await file.text();
  if (text.includes("\0") || text.includes("\ufffd")) throw new Error(`${file.name} is neither text nor an image (PNG, JPEG, WebP, GIF).`);
  return { name: file.name, text };
};

const attach = async (files) => {
  const here = chat, problems = [];
  for (const file of files) {
    try {
      const content = await contentOf(file);
      // Reading takes a while: the file is for the chat that it was dropped on.
      if (chat === here) attached.push(content);
    } catch (error) { problems.push(error.message); }
  }
  showAttached(problems.join(" "));
  say(problems.join(" "));
};

const startComposer = () => {
  $("text").enterKeyHint = TOUCH ? "enter" : "send";
  $("form").addEventListener("submit", (e) => { e.preventDefault(); send(); });
  $("text").addEventListener("input", showComposer);
  $("text").addEventListener("keydown", (e) => {
    // A keyboard on glass has no Shift-Enter: there Enter makes a line, and the button sends.
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing && !TOUCH) { e.preventDefault(); send(); }
    if (e.key === "ArrowUp" && !$("text").value) {
      const last = chat.messages.findLastIndex((message) => message.role === "user");
      if (last >= 0) { e.preventDefault(); edit(last); }
    }
  });
  $("stop").addEventListener("click", () => { stop(); focusText(); });
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
};
