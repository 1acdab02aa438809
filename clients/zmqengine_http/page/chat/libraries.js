// Libraries that few answers need: each is fetched from this server when the first answer needs it. The policy of the page
// lets one run by the hash of its text alone, and this one policy of trusted types make scripts.
const LIBRARIES = { hljs: "page/highlight-11.12.0.min.js", temml: "page/temml-0.13.5.min.js" };
const libraries = {};
const scripts = window.trustedTypes
  ? trustedTypes.createPolicy("zmqengine", { createScript: (text) => text }) : { createScript: (text) => text };

const load = async (name) => {
  const answer = await call(LIBRARIES[name]);
  if (!answer.ok) return;
  const script = document.createElement("script");
  script.text = scripts.createScript(await answer.text());
  document.head.append(script);
};

// Run `act` at once if the library is there, else when it has come: without it, text is plain.
const withLibrary = (name, act) => {
  if (window[name]) return act(window[name]);
  libraries[name] ??= load(name);
  return libraries[name].then(() => window[name] && act(window[name]), () => { delete libraries[name]; });
};

const scoped = (part) => {
  if (typeof part === "string") return part;
  const node = element("span", "", (part.scope || "").split(".").map((word, place) => (place ? `${word}_` : `hljs-${word}`)).join(" "));
  node.append(...part.children.map(scoped));
  return node;
};

// Code with its words coloured, if its language is known.
const highlighted = (text, language) => {
  const code = element("code", text);
  if (language) withLibrary("hljs", (hljs) => {
    if (!hljs.getLanguage(language)) return;
    const result = hljs.highlight(text, { language, ignoreIllegals: true });
    // The tree behind its HTML.
    code.replaceChildren(...result._emitter.rootNode.children.map(scoped));
  });
  return code;
};

// TeX as MathML, which browsers draw themselves; what is no TeX stays as it is.
const formula = (text, display) => {
  const node = element("span", text, display ? "formula display" : "formula");
  // A wide one is scrolled with the arrow keys.
  if (display) node.tabIndex = 0;
  withLibrary("temml", (temml) => {
    try { temml.render(text, node, { displayMode: display, throwOnError: true }); } catch { node.replaceChildren(element("code", text)); }
  });
  return node;
};
