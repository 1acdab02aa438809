// Tokens that tell, when hovered or reached by the arrow keys, what else they could have been.
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
