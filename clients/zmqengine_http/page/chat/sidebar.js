// The chats that were kept: by day, searched, renamed, deleted, exported and imported.
let chats = [];
let chat = null;
const removed = new Set(); // An answer that still comes to one of them must not bring it back.
const DAY_MS = 24 * 60 * 60 * 1000;
const NARROW = matchMedia("(max-width: 760px)");

const fresh = () => ({ id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), title: "", updated: Date.now(), system: "", messages: [] });
const titleOf = (each) => each.title || "New chat";

const keep = async (each = chat) => {
  if (removed.has(each)) return;
  each.updated = Date.now();
  if (!each.title) {
    const first = each.messages.find((message) => message.role === "user");
    each.title = first ? first.content.trim().slice(0, 60) || "Attached file" : "";
  }
  if (!chats.includes(each)) chats.unshift(each);
  try { await store.keep(each); } catch (error) { toast(`This browser does not keep the chat: ${error.message}`); }
};

const openChat = (each) => {
  // What was written and not sent stays with its chat; a chat that was never kept hands it on.
  if (chats.includes(chat)) chat.draft = $("text").value;
  else if (!chats.includes(each)) each.draft = $("text").value;
  chat = each;
  attached = [];
  showAttached();
  $("system").value = chat.system;
  countOptions();
  localStorage.setItem("zmqengine-chat", chat.id);
  if (NARROW.matches) openSidebar(false);
  showAll();
  showChats();
  showBusy();
  write(chat.draft || "");
};

const openSidebar = (open) => {
  $("app").classList.toggle("listing", open);
  $("chats").hidden = !open;
  $("menu").hidden = open && !NARROW.matches;
  for (const node of [$("menu"), $("menu-close")]) node.setAttribute("aria-expanded", open);
  if (!NARROW.matches) { settings.closed = !open; keepSettings(); }
};

// --- the list ------------------------------------------------------------------------------------------------

const dayOf = (each) => {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - each.updated) / DAY_MS);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 7 ? "This week" : days < 30 ? "This month" : "Earlier";
};

// The words around the first place of a chat where the query stands, or nothing.
const hitOf = (each, query) => {
  for (const text of each.messages.map((message) => message.content)) {
    const at = text.toLowerCase().indexOf(query);
    if (at >= 0) return [text.slice(Math.max(0, at - 20), at), text.slice(at, at + query.length), text.slice(at + query.length, at + 60)];
  }
  return null;
};

const showChats = () => {
  const query = $("search").value.trim().toLowerCase();
  chats.sort((a, b) => b.updated - a.updated);
  const groups = new Map();
  for (const each of chats) {
    const hit = query ? hitOf(each, query) : null;
    if (query && !hit && !titleOf(each).toLowerCase().includes(query)) continue;
    if (!groups.has(dayOf(each))) groups.set(dayOf(each), []);
    groups.get(dayOf(each)).push(chatLine(each, hit));
  }
  $("list").replaceChildren(...[...groups].map(([day, lines]) => {
    const group = element("section");
    const list = element("ul");
    list.setAttribute("aria-label", day);
    list.append(...lines);
    group.append(element("h2", day), list);
    return group;
  }));
  if (!groups.size) $("list").append(element("p", query ? "No chat has these words." : "Your chats stay in this browser.", "note"));
  $("title").textContent = titleOf(chat);
  document.title = chat && chat.title ? `${chat.title} · zmqengine` : "zmqengine";
};

const chatLine = (each, hit) => {
  const line = element("li");
  const open = button("", () => openChat(each));
  open.className = "open";
  open.title = titleOf(each);
  open.append(element("span", titleOf(each)));
  if (running.has(each)) {
    open.classList.add("running");
    open.setAttribute("aria-label", `${titleOf(each)}, an answer comes`);
  }
  if (hit) {
    const words = element("small");
    words.append(hit[0], element("mark", hit[1]), hit[2]);
    open.append(words);
  }
  if (each === chat) open.setAttribute("aria-current", "true");
  open.addEventListener("dblclick", () => rename(each, line));
  line.append(open, iconButton("pencil", `Rename ${titleOf(each)}`, () => rename(each, line)), iconButton("trash-2", `Delete ${titleOf(each)}`, () => remove(each)));
  return line;
};

const rename = (each, line) => {
  const field = element("input");
  field.value = titleOf(each);
  field.setAttribute("aria-label", "Name of the chat");
  let ended = false;
  const end = async (name) => {
    if (ended) return;
    ended = true;
    if (name) {
      each.title = name;
      try { await store.keep(each); } catch (error) { toast(error.message); }
    }
    showChats();
    $("list").querySelector("[aria-current]")?.focus();
  };
  field.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && !e.isComposing) end(field.value.trim());
    if (e.key === "Escape") { e.stopPropagation(); end(""); }
  });
  field.addEventListener("blur", () => end(field.value.trim()));
  line.replaceChildren(field);
  field.select();
};

const remove = async (each) => {
  chats = chats.filter((other) => other !== each);
  removed.add(each);
  running.get(each)?.abort();
  await store.drop(each.id);
  if (each === chat) openChat(chats[0] || fresh());
  else showChats();
  toast(`Deleted "${titleOf(each)}".`, "Undo", async () => {
    removed.delete(each);
    chats.push(each);
    await store.keep(each);
    openChat(each);
  });
};

// --- files of chats ------------------------------------------------------------------------------------------

const asText = (each) => `# ${titleOf(each)}\n\n` + (each.system ? `**System**\n\n${each.system}\n\n` : "") + each.messages.map((message) =>
  `**${message.role === "user" ? "You" : "Model"}**\n\n${withFiles(message)}`).join("\n\n") + "\n";

// Chats of an exported file, beside those that are here.
const importChats = async (file) => {
  try {
    const read = JSON.parse(await file.text());
    if (!Array.isArray(read) || !read.every((each) => each && typeof each.id === "string" && Array.isArray(each.messages))) throw new Error("these are no exported chats");
    const other = read.filter((each) => !chats.some((here) => here.id === each.id));
    for (const each of other) await store.keep(each);
    chats.push(...other);
    showChats();
    toast(`${many(other.length, "chat")} imported.`);
  } catch (error) { toast(`${file.name} cannot be imported: ${error.message}`); }
};

const startSidebar = () => {
  $("new").addEventListener("click", () => openChat(fresh()));
  $("new-top").addEventListener("click", () => openChat(fresh()));
  $("menu").addEventListener("click", () => openSidebar(true));
  $("menu-close").addEventListener("click", () => openSidebar(false));
  $("scrim").addEventListener("click", () => { openSidebar(false); openOptions(false); });
  $("search").addEventListener("input", showChats);
  $("more").addEventListener("click", () => $("chat-menu").togglePopover());
  $("chat-menu").addEventListener("click", () => $("chat-menu").hidePopover());
  $("export-text").addEventListener("click", () => saveFile(`${titleOf(chat).replace(/[^\w -]/g, "")}.md`, asText(chat), "text/markdown"));
  $("export-all").addEventListener("click", () => saveFile("zmqengine-chats.json", JSON.stringify(chats, null, 1), "application/json"));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => { await importChats($("import-file").files[0]); $("import-file").value = ""; });
  NARROW.addEventListener("change", () => openSidebar(!NARROW.matches && !settings.closed));
  openSidebar(!NARROW.matches && !settings.closed);
};
