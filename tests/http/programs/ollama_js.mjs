// Ollama's JavaScript client against a front-end: node ollama_js.mjs URL KEY, one JSON line a check.
import { Ollama } from "ollama";
import { runChecks } from "./run_checks.mjs";

const [host, key] = process.argv.slice(2);
const client = new Ollama({ host, headers: { authorization: `Bearer ${key}` } });
const model = "scripted";
const messages = [{ role: "user", content: "hello" }];
const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "add", description: "adds", parameters } }];

function holds(condition, what) {
  if (!condition) throw new Error(what);
}

const checks = {
  async chat() {
    const reply = await client.chat({ model, messages });
    holds(reply.message.content.startsWith("You said: hello"), reply.message.content);
    holds(reply.message.thinking === "hm", reply.message.thinking);
    holds(reply.done_reason === "stop" && reply.eval_count > 0, JSON.stringify(reply));
  },
  async "chat, streamed"() {
    let text = "", last;
    for await (const part of await client.chat({ model, messages, stream: true, think: false })) {
      text += part.message.content;
      last = part;
    }
    holds(text.startsWith("You said: hello") && last.done, text);
  },
  async "a stream that is aborted"() {
    const endless = [{ role: "user", content: "without end" }];
    const stream = await client.chat({ model, messages: endless, stream: true });
    let aborted = false;
    try {
      for await (const part of stream) if (part) stream.abort();
    } catch (error) {
      aborted = error.name === "AbortError";
    }
    holds(aborted, "no AbortError");
  },
  async tools() {
    const { message } = await client.chat({ model, messages, tools });
    const [call] = message.tool_calls;
    holds(call.function.name === "add" && call.function.arguments.b === 2, JSON.stringify(call));
    const answered = [...messages, message, { role: "tool", tool_name: "add", content: "3" }];
    const reply = await client.chat({ model, messages: answered, tools, think: false });
    holds(reply.message.content === "It is 3.", reply.message.content);
  },
  async "generate, with a schema"() {
    const reply = await client.generate({ model, prompt: "hello", format: parameters, think: false });
    holds(reply.response.startsWith("You said: hello"), reply.response);
  },
  async "list, ps and show"() {
    holds((await client.list()).models[0].name === model, "list");
    holds((await client.ps()).models[0].context_length === 4096, "ps");
    holds((await client.show({ model })).capabilities.includes("tools"), "show");
  },
  async errors() {
    let refusal;
    await client.chat({ model: "other", messages }).catch((error) => (refusal = error));
    holds(refusal.status_code === 404 && /does not exist/.test(refusal.message), String(refusal));
  },
};

await runChecks(checks);
process.exit(0);
