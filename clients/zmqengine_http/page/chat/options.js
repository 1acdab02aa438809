// The options of every chat in this browser, and the system prompt of each.
const SAMPLING = JSON.parse($("sampling-fields").textContent);
const OPTIONS = [...Object.keys(SAMPLING), "max_tokens", "thinking_max", "seed", "stop-texts", "format", "schema", "reasoning_effort", "logprobs"];

const labelOf = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

// An input for each sampling parameter that the server knows, with its bounds.
const showSampling = () => {
  $("sampling").replaceChildren(...Object.entries(SAMPLING).map(([name, field]) => {
    const label = element("label", labelOf(name));
    const input = element("input");
    input.id = name;
    label.title = field.description || "";
    if (field.type === "object") {
      input.placeholder = "{\"42\": -100}";
      label.className = "wide";
    } else {
      input.type = "number";
      input.step = field.type === "integer" ? "1" : "any";
      input.placeholder = field.default;
      if (field.minimum != null) input.min = field.minimum;
      if (field.maximum != null) input.max = field.maximum;
    }
    label.append(input);
    return label;
  }));
};

const valueOf = (name) => ($(name).type === "checkbox" ? $(name).checked : $(name).value);

// How many options are not the model's own.
const countOptions = () => {
  const changed = OPTIONS.filter((name) => valueOf(name) && name !== "schema").length + ($("system").value.trim() ? 1 : 0);
  $("options-open").dataset.count = changed || "";
  $("options-open").setAttribute("aria-label", changed ? `Options, ${changed} set` : "Options");
  $("schema-field").hidden = $("format").value !== "json_schema";
};

// Raises an error that names the field if its text is no JSON.
const jsonOf = (name) => {
  try { return JSON.parse($(name).value); } catch (error) { throw new Error(`${labelOf(name)}: ${error.message}`); }
};

const checkJson = (name) => {
  let reason = "";
  if ($(name).value.trim()) try { jsonOf(name); } catch (error) { reason = error.message; }
  $(name).setCustomValidity(reason);
  $(name).setAttribute("aria-invalid", reason !== "");
  if (name === "schema") $("schema-error").textContent = reason;
};

// The fields of a request. A field that was left empty is the model's own default.
const optionFields = () => {
  const fields = {};
  for (const [name, field] of Object.entries(SAMPLING)) {
    if ($(name).value.trim()) fields[name] = field.type === "object" ? jsonOf(name) : Number($(name).value);
  }
  for (const name of ["max_tokens", "seed"]) if ($(name).value !== "") fields[name] = Number($(name).value);
  if ($("thinking_max").value !== "" && !$("effort").hidden) fields.thinking_max = Number($("thinking_max").value);
  const stops = $("stop-texts").value.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  if ($("format").value === "json_object") fields.response_format = { type: "json_object" };
  if ($("format").value === "json_schema") fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: jsonOf("schema") } };
  if ($("reasoning_effort").value && !$("effort").hidden) fields.reasoning_effort = $("reasoning_effort").value;
  if ($("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return fields;
};

const showPresets = () => {
  const choose = element("option", settings.presets.length ? "Saved prompts" : "No saved prompts");
  choose.value = "";
  $("presets").replaceChildren(choose, ...settings.presets.map((text) => {
    const option = element("option", text.slice(0, 50));
    option.value = text;
    return option;
  }));
  $("presets").disabled = !settings.presets.length;
  $("drop-preset").disabled = true;
};

const takeSystem = () => {
  chat.system = $("system").value;
  countOptions();
  if (chat.messages.length) keep();
};

const openOptions = (open) => {
  $("app").classList.toggle("options", open);
  $("options").hidden = !open;
  $("options-open").setAttribute("aria-expanded", open);
  if (open) $("options-close").focus();
};

const startOptions = () => {
  showSampling();
  showPresets();
  for (const name of OPTIONS) {
    const field = $(name);
    if (field.type === "checkbox") field.checked = Boolean(settings[name]);
    else field.value = settings[name] ?? "";
    field.addEventListener("change", () => {
      settings[name] = valueOf(name);
      keepSettings();
      countOptions();
    });
  }
  for (const name of [...Object.keys(SAMPLING).filter((each) => SAMPLING[each].type === "object"), "schema"]) {
    $(name).addEventListener("input", () => checkJson(name));
    checkJson(name);
  }
  $("reset").addEventListener("click", () => {
    for (const name of OPTIONS) {
      delete settings[name];
      if ($(name).type === "checkbox") $(name).checked = false;
      else $(name).value = "";
    }
    keepSettings();
    countOptions();
    say("All options are the model's own.");
  });
  $("system").addEventListener("input", takeSystem);
  $("presets").addEventListener("change", () => {
    $("drop-preset").disabled = !$("presets").value;
    if (!$("presets").value) return;
    $("system").value = $("presets").value;
    takeSystem();
  });
  $("keep-preset").addEventListener("click", () => {
    const text = $("system").value.trim();
    if (text && !settings.presets.includes(text)) settings.presets.push(text);
    keepSettings();
    showPresets();
  });
  $("drop-preset").addEventListener("click", () => {
    settings.presets = settings.presets.filter((text) => text !== $("presets").value);
    keepSettings();
    showPresets();
  });
  $("theme").value = localStorage.getItem("zmqengine-theme") || "";
  $("theme").addEventListener("change", () => {
    localStorage.setItem("zmqengine-theme", $("theme").value);
    showTheme();
  });
  $("options-open").addEventListener("click", () => openOptions($("options").hidden));
  $("options-close").addEventListener("click", () => { openOptions(false); $("options-open").focus(); });
};
