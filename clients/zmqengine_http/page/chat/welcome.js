// What stands where a chat has not begun: a greeting, the state of the model, and questions to begin with.
const SUGGESTIONS = [
  { icon: "lightbulb", title: "Explain", words: "how a language model writes", text: "Explain how a language model writes a text, word by word, to someone who can program but knows no machine learning." },
  { icon: "code", title: "Write code", words: "with a test", text: "Write a Python function that returns the longest common prefix of a list of strings, and a test of it." },
  { icon: "list-checks", title: "Make a plan", words: "for eight weeks", text: "Make a plan for learning linear algebra in eight weeks, as a table: the week, the subject, one exercise." },
  { icon: "text-quote", title: "Summarise", words: "a text that you paste", text: "Summarise this text in three sentences:\n\n", open: true },
];
const LOOK = { icon: "image", title: "Describe", words: "a picture of yours", picture: true };

const greeting = () => {
  const hour = new Date().getHours();
  return hour < 5 ? "Still awake?" : hour < 12 ? "Good morning" : hour < 18 ? "Good afternoon" : "Good evening";
};

const suggestion = (each) => {
  const node = button("", () => {
    if (each.picture) {
      write("Describe this picture.");
      $("attach").click();
      return;
    }
    write(each.text);
    if (!each.open) send();
  });
  const words = element("span");
  words.append(element("strong", each.title), element("small", each.words));
  node.append(icon(each.icon), words);
  return node;
};

const showWelcome = () => {
  const empty = !chat || !chat.messages.length;
  $("app").classList.toggle("empty", empty);
  $("welcome").hidden = !empty;
  if (!empty) return;
  const model = chosen();
  $("greeting").textContent = greeting();
  $("model-facts").replaceChildren(...(model ? [dot(model), element("span", [model.id, stateWords(model), ...factsOf(model)].join(" · "))] : []));
  const sees = model && abilities(model).includes("vision");
  const offered = sees ? [LOOK, ...SUGGESTIONS.slice(0, 3)] : SUGGESTIONS;
  $("suggestions").replaceChildren(...(model ? offered.map(suggestion) : []));
};
