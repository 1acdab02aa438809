// Markdown as elements. The library only parses: its tokens become elements by a list of names, and text is only ever text,
// so that nothing that a model or a user says becomes markup of its own.
const parser = markdownit({ html: false, linkify: true });
const PLAIN = new Set([
  "p", "strong", "em", "s", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "h1", "h2", "h3", "h4",
  "h5", "h6", "hr", "br",
]);
const LINK = /^(https?|mailto):/i;

const codeBlock = (text, language) => {
  const box = element("div", "", "block");
  const bar = element("div", "", "bar");
  const copy = button("Copy", async () => {
    const done = await copied(text);
    copy.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  }, "Copy the code");
  bar.append(element("span", language), copy);
  const frame = element("pre");
  frame.tabIndex = 0;
  frame.append(element("code", text));
  box.append(bar, frame);
  return box;
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
  const made = element(token.tag);
  // A wide one is scrolled with the arrow keys.
  if (token.tag === "table") made.tabIndex = 0;
  if (token.tag === "ol" && token.attrGet("start")) made.start = Number(token.attrGet("start"));
  return made;
};

const put = (tokens, root) => {
  const open = [root];
  for (const token of tokens) {
    const into = open[open.length - 1];
    if (token.type === "inline") put(token.children, into);
    else if (token.type === "fence" || token.type === "code_block") into.append(codeBlock(token.content, (token.info || "").trim().split(/\s/)[0]));
    else if (token.type === "code_inline") into.append(element("code", token.content));
    else if (token.type === "softbreak") into.append("\n");
    // An image would be fetched from elsewhere: its description and its address stand for it.
    else if (token.type === "image") into.append(`${token.content} (${token.attrGet("src")})`);
    else if (token.nesting > 0) {
      // A paragraph of a tight list is hidden: its text belongs to the item.
      const made = token.hidden ? into : opened(token);
      if (!token.hidden) into.append(made);
      open.push(made);
    } else if (token.nesting < 0) open.pop();
    else if (PLAIN.has(token.tag)) into.append(element(token.tag));
    else into.append(token.content);
  }
};

const markdown = (text) => {
  const made = document.createDocumentFragment();
  put(parser.parse(text, {}), made);
  return made;
};
