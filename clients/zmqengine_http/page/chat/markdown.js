// Markdown as elements. The library only parses: its tokens become elements by a list of names, and text is only ever text,
// so that nothing that a model or a user says becomes markup of its own.
const parser = markdownit({ html: false, linkify: true });
const PLAIN = new Set([
  "p", "strong", "em", "s", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "h1", "h2", "h3", "h4",
  "h5", "h6", "hr", "br",
]);
const LINK = /^(https?|mailto):/i;
const TEX_ENDS = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };
// Two prices in a sentence are no formula: no space inside the dollars, no digit behind them.
const DOLLARS = /\$(?!\s)((?:[^\\$\n]|\\.)+?)(?<!\s)\$(?!\d)/y;

const texInline = (state, silent) => {
  const open = state.src.slice(state.pos, state.pos + 2);
  let text, end;
  if (TEX_ENDS[open]) {
    const close = state.src.indexOf(TEX_ENDS[open], state.pos + 2);
    if (close < 0) return false;
    text = state.src.slice(state.pos + 2, close);
    end = close + 2;
  } else {
    DOLLARS.lastIndex = state.pos;
    const match = DOLLARS.exec(state.src);
    if (!match) return false;
    text = match[1];
    end = DOLLARS.lastIndex;
  }
  if (!text.trim()) return false;
  if (!silent) Object.assign(state.push("tex", "math", 0), { content: text, meta: { display: open !== "\\(" && TEX_ENDS[open] !== undefined } });
  state.pos = end;
  return true;
};

// A formula on lines of its own, which may begin like items of a list.
const texBlock = (state, start, last, silent) => {
  const begin = state.bMarks[start] + state.tShift[start];
  const open = state.src.slice(begin, begin + 2);
  if (open === "\\(" || !TEX_ENDS[open]) return false;
  const close = state.src.indexOf(TEX_ENDS[open], begin + 2);
  let line = start;
  while (line < last && state.eMarks[line] < close) line += 1;
  if (close < 0 || line >= last || state.src.slice(close + 2, state.eMarks[line]).trim()) return false;
  if (silent) return true;
  const source = state.getLines(start, line + 1, state.blkIndent, false).trim();
  Object.assign(state.push("tex", "math", 0), { content: source.slice(2, -2), meta: { display: true }, map: [start, line + 1] });
  state.line = line + 1;
  return true;
};
parser.inline.ruler.before("escape", "tex", texInline);
parser.block.ruler.before("fence", "tex", texBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });

const codeBlock = (text, language) => {
  const box = element("div", "", "block");
  const bar = element("div", "", "bar");
  bar.append(element("span", language), copyButton("Copy the code", () => text));
  const frame = element("pre");
  frame.tabIndex = 0;
  frame.append(highlighted(text, language));
  box.append(bar, frame);
  return box;
};

// Its icon tells for a while whether the text was copied.
const copyButton = (label, text) => {
  const node = iconButton("copy", label, async () => {
    const done = await copied(text());
    node.replaceChildren(icon(done ? "check" : "x"));
    say(done ? "Copied." : "Not copied.");
    setTimeout(() => node.replaceChildren(icon("copy")), 1500);
  });
  return node;
};

// The clipboard is closed to pages that do not come over https or from this machine: a selection that the browser copies.
const copied = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
};

const opened = (token) => {
  if (token.tag === "a") {
    const target = token.attrGet("href") || "";
    if (!LINK.test(target)) return element("span");
    const link = element("a");
    link.href = target;
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    return link;
  }
  if (!PLAIN.has(token.tag)) return element("span");
  const node = element(token.tag);
  // A wide one is scrolled with the arrow keys.
  if (token.tag === "table") node.tabIndex = 0;
  if (token.tag === "th" || token.tag === "td") node.style.textAlign = (token.attrGet("style") || "").replace("text-align:", "");
  if (token.tag === "ol" && token.attrGet("start")) node.start = Number(token.attrGet("start"));
  return node;
};

const put = (tokens, root) => {
  const open = [root];
  for (const token of tokens) {
    const into = open[open.length - 1];
    if (token.type === "inline") put(token.children, into);
    else if (token.type === "fence" || token.type === "code_block") into.append(codeBlock(token.content, (token.info || "").trim().split(/\s/)[0]));
    else if (token.type === "code_inline") into.append(element("code", token.content));
    else if (token.type === "tex") into.append(formula(token.content, token.meta.display));
    else if (token.type === "softbreak") into.append("\n");
    // An image would be fetched from elsewhere: its description and its address stand for it.
    else if (token.type === "image") into.append(`${token.content} (${token.attrGet("src")})`);
    else if (token.nesting > 0) {
      // A paragraph of a tight list is hidden: its text belongs to the item.
      const node = token.hidden ? into : opened(token);
      if (!token.hidden) into.append(node);
      open.push(node);
    } else if (token.nesting < 0) open.pop();
    else if (PLAIN.has(token.tag)) into.append(element(token.tag));
    else into.append(token.content);
  }
};

// The tokens of each outermost block, with the lines it was written on.
const blocks = (text) => {
  const parts = [], lines = text.split("\n");
  let depth = 0, from = 0;
  const tokens = parser.parse(text, {});
  tokens.forEach((token, place) => {
    depth += token.nesting;
    if (depth > 0) return;
    parts.push({ source: tokens[from].type + lines.slice(...(tokens[from].map || [])).join("\n"), tokens: tokens.slice(from, place + 1) });
    from = place + 1;
  });
  return parts;
};

// Show a text that grows: blocks that it had before keep their elements, with what is selected and scrolled in them.
const showMarkdown = (box, text) => {
  const old = box.blocks || [], parts = blocks(text);
  let same = 0;
  while (same < old.length && same < parts.length && old[same].source === parts[same].source) same += 1;
  for (const node of old.slice(same).flatMap((part) => part.nodes)) node.remove();
  for (const part of parts.slice(same)) {
    const fragment = document.createDocumentFragment();
    put(part.tokens, fragment);
    part.nodes = [...fragment.childNodes];
    box.append(fragment);
  }
  box.blocks = [...old.slice(0, same), ...parts.slice(same)];
};
