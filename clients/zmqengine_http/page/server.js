"use strict";
// What both pages share: elements, requests with a key, and words for numbers.
const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("zmqengine-key") || "";

const element = (kind, text = "", name = "") => {
  const made = document.createElement(kind);
  made.textContent = text;
  if (name) made.className = name;
  return made;
};

const button = (text, act, label = "") => {
  const made = element("button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
};

const call = async (path, options = {}) => {
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401 && !$("ask").open) {
    $("ask-why").textContent = key ? "The server does not know this key." : "This server asks for a key.";
    $("ask").showModal();
  }
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

const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

// Run `refresh` of the page now and then, while somebody may be looking.
const follow = async (pause_ms) => {
  for (;;) {
    if (!document.hidden && !$("ask").open) await refresh();
    await new Promise((go) => setTimeout(go, pause_ms));
  }
};
