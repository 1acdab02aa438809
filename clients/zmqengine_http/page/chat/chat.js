// The page: what its parts say to the user, shortcuts of the keyboard, and the start.
const say = (text) => { $("news").textContent = text; };

let toastTimer = 0;
const toast = (text, label = "", act = null) => {
  const close = () => { $("toast").hidden = true; };
  $("toast").replaceChildren(element("span", text), ...(act ? [button(label, () => { close(); act(); })] : []), iconButton("x", "Close", close));
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, 10000);
};

const APPLE = /Mac|iPhone|iPad/.test(navigator.platform);
const SHORTCUTS = [
  { keys: ["K"], what: "Search the chats", act: () => { openSidebar(true); $("search").focus(); } },
  { keys: ["Shift", "O"], what: "New chat", act: () => openChat(fresh()) },
  { keys: ["Shift", "M"], what: "Choose a model", act: () => $("models").togglePopover() },
  { keys: ["B"], what: "Show or hide the chats", act: () => openSidebar($("chats").hidden) },
  { keys: ["."], what: "Show or hide the options", act: () => openOptions($("options").hidden) },
  { keys: ["/"], what: "This list", act: () => ($("shortcuts").open ? $("shortcuts").close() : $("shortcuts").showModal()) },
];
const OTHERS = [
  [["Enter"], "Send"], [["Shift", "Enter"], "New line"], [["Esc"], "Stop the answer"], [["↑"], "Edit your last message, from an empty field"],
  [["←", "→"], "From token to token, where probabilities are shown"],
];

const showShortcuts = () => {
  const row = (keys, what) => {
    const line = element("div");
    const names = element("dt");
    names.append(...keys.map((each) => element("kbd", each)));
    line.append(names, element("dd", what));
    return line;
  };
  const control = APPLE ? "⌘" : "Ctrl";
  $("shortcut-list").replaceChildren(...SHORTCUTS.map((each) => row([control, ...each.keys], each.what)), ...OTHERS.map(([keys, what]) => row(keys, what)));
};

const onKey = (e) => {
  // What lies above the conversation is closed first.
  if (e.key === "Escape" && running.has(chat) && !document.querySelector("dialog[open], :popover-open")) return stop();
  if (!(APPLE ? e.metaKey : e.ctrlKey) || e.altKey) return;
  const name = e.key.toUpperCase();
  const shortcut = SHORTCUTS.find((each) => each.keys.at(-1) === name && (each.keys.length > 1) === e.shiftKey);
  if (!shortcut) return;
  e.preventDefault();
  shortcut.act();
};

(async () => {
  chat = fresh();
  startOptions();
  startComposer();
  startModels();
  startSidebar();
  showShortcuts();
  document.addEventListener("keydown", onKey);
  $("help").addEventListener("click", () => $("shortcuts").showModal());
  followEnd();
  follow(() => (models.some(loading) ? 500 : 2000));
  try { chats = await store.all(); } catch (error) { toast(`This browser keeps no chats: ${error.message}`); }
  // An answer without an end was being written when the page was closed.
  for (const message of chats.flatMap((each) => each.messages)) if (message.role === "assistant" && !message.finish) message.finish = "interrupted";
  const last = localStorage.getItem("zmqengine-chat");
  openChat(chats.find((each) => each.id === last) || chat);
  document.body.dataset.loaded = 1;
})();
