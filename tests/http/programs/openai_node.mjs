// The official JavaScript client against a front-end: node openai_node.mjs URL, one JSON line a check.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { runChecks } from "./run_checks.mjs";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0, timeout: 30000 });
const model = "scripted";
const hello = [{ role: "user", content: "Hello" }];
const add = {
  type: "function",
  function: {
    name: "add",
    parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
  },
};
const runnable = { ...add, function: { ...add.function, parse: JSON.parse, function: ({ a, b }) => String(a + b) } };
const Sum = z.object({ sum: z.number() });

function same(found, wanted) {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
}

const checks = {
  async "models.list"() {
    same((await client.models.list()).data[0].id, "scripted");
  },
  async chat() {
    same((await client.chat.completions.create({ model, messages: hello })).choices[0].message.content, "You said: Hello");
  },
  async "chat, max_tokens 32000"() {
    const answer = await client.chat.completions.create({ model, messages: hello, max_tokens: 32000 });
    same(answer.choices[0].finish_reason, "stop");
  },
  async "chat, streamed with usage"() {
    const stream = await client.chat.completions.create({ model, messages: hello, stream: true, stream_options: { include_usage: true } });
    let text = "", usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    same([text, usage.completion_tokens], ["You said: Hello", 16]);
  },
  async "chat, stream helper"() {
    same(await client.chat.completions.stream({ model, messages: hello }).finalContent(), "You said: Hello");
  },
  async "a stream that is left"() {
    const stream = await client.chat.completions.create({ model, messages: hello, stream: true });
    for await (const _ of stream) break;
  },
  async AbortController() {
    const controller = new AbortController();
    const endless = [{ role: "user", content: "without end" }];
    const stream = await client.chat.completions.create({ model, messages: endless, stream: true }, { signal: controller.signal });
    let count = 0;
    for await (const _ of stream) if (++count === 2) controller.abort();
  },
  async completions() {
    same((await client.completions.create({ model, prompt: "Hello", max_tokens: 50 })).choices[0].text, "You said: Hello");
  },
  async "runTools"() {
    same(await client.chat.completions.runTools({ model, messages: hello, tools: [runnable] }).finalContent(), "It is 3.");
  },
  async "runTools, streamed"() {
    same(await client.chat.completions.runTools({ model, messages: hello, tools: [runnable], stream: true }).finalContent(), "It is 3.");
  },
  async "an error is the client's own"() {
    try {
      await client.chat.completions.create({ model, messages: hello, temperature: 99 });
    } catch (error) {
      return same([error.constructor.name, error.param], ["BadRequestError", "temperature"]);
    }
    throw new Error("no error");
  },
  async "responses"() {
    same((await client.responses.create({ model, input: "Hello" })).output_text, "You said: Hello");
  },
  async "responses, streamed"() {
    let text = "";
    for await (const event of await client.responses.create({ model, input: "Hello", stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    same(text, "You said: Hello");
  },
  async "tool_choice required"() {
    const answer = await client.chat.completions.create({ model, messages: hello, tools: [add], tool_choice: "required" });
    same(answer.choices[0].message.tool_calls[0].function.name, "add");
  },
  async zodFunction() {
    const tool = zodFunction({ name: "add", parameters: z.object({ a: z.number(), b: z.number() }) });
    const answer = await client.chat.completions.parse({ model, messages: hello, tools: [tool] });
    same(answer.choices[0].message.tool_calls[0].function.parsed_arguments, { a: 1, b: 2 });
  },
  async zodResponseFormat() {
    const answer = await client.chat.completions.parse({ model, messages: hello, response_format: zodResponseFormat(Sum, "sum") });
    same(typeof answer.choices[0].message.parsed.sum, "number");
  },
  async embeddings() {
    await client.embeddings.create({ model, input: "Hello" });
  },
};

await runChecks(checks, 20_000);
