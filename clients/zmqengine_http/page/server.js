"use strict";
// What both pages share: elements, icons, requests with a key, and words for numbers.
const $ = (id) => document.getElementById(id);
const UNREACHABLE = "The server does not answer.";
let key = sessionStorage.getItem("zmqengine-key") || "";

const element = (kind, text = "", name = "") => {
  const node = document.createElement(kind);
  node.textContent = text;
  if (name) node.className = name;
  return node;
};

const icon = (name) => {
  const node = $("icon").content.firstElementChild.cloneNode(true);
  node.firstElementChild.setAttribute("href", `#icon-${name}`);
  return node;
};

const button = (text, act, label = "") => {
  const node = element("button", text);
  node.type = "button";
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", act);
  return node;
};

// A button that shows an icon; its label is also its tooltip.
const iconButton = (name, label, act) => {
  const node = button("", act, label);
  node.className = "icon-button";
  node.title = label;
  node.append(icon(name));
  return node;
};

const call = async (path, options = {}) => {
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try { answer = await fetch(path, { ...options, headers }); } catch (error) {
    throw error.name === "AbortError" ? error : new Error(UNREACHABLE);
  }
  if (answer.status === 401 && !$("ask").open) {
    $("ask-why").textContent = key ? "The server does not know this key." : "This server asks for a key.";
    $("ask").showModal();
  }
  return answer;
};

const postJson = (path, body, options = {}) => call(path, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), ...options,
});

const failure = async (answer) => {
  try { return (await answer.json()).error.message; } catch { return `The server answered ${answer.status}.`; }
};

$("ask").addEventListener("close", () => {
  key = $("key").value.trim();
  sessionStorage.setItem("zmqengine-key", key);
  refresh();
});

const many = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && bytes < 9.95 ? bytes.toFixed(1) : bytes.toFixed(0)} ${units[unit]}`;
};

// The theme of this browser's user, if it is not that of the system.
const showTheme = () => { document.documentElement.dataset.theme = localStorage.getItem("zmqengine-theme") || ""; };
showTheme();
addEventListener("storage", showTheme);

// Run `refresh` of the page now and then, while somebody may be looking.
const follow = async (pauseMs) => {
  for (;;) {
    if (!document.hidden && !$("ask").open) await refresh();
    await new Promise((go) => setTimeout(go, pauseMs()));
  }
};
