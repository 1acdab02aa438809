// An image through the AI SDK and OpenAI's client for Node: node images.mjs URL BASE64, one JSON line a check.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";
import { runChecks } from "./run_checks.mjs";

const [, , url, data] = process.argv;
const baseURL = url + "/v1";
const wanted = "A red circle.";
const question = "What do you see?";
const model = "pico-eye";
const bytes = Buffer.from(data, "base64");
const dataURL = `data:image/png;base64,${data}`;
const compatible = createOpenAICompatible({ name: "zmqengine", baseURL })(model);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL, apiKey: "none" })(model);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

function same(found) {
  if (found !== wanted) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
}

function asked(image) {
  return { messages: [{ role: "user", content: [{ type: "text", text: question }, { type: "image", image }] }], temperature: 0, maxRetries: 0 };
}

async function streamed(model) {
  let all = "", failure;
  const stream = streamText({ model, ...asked(bytes), onError: ({ error }) => (failure = error) });
  for await (const piece of stream.textStream) all += piece;
  if (failure) throw failure;
  return all;
}

const checks = {
  "ai, compatible, bytes": async () => same((await generateText({ model: compatible, ...asked(bytes) })).text),
  "ai, compatible, data URL": async () => same((await generateText({ model: compatible, ...asked(dataURL) })).text),
  "ai, compatible, streamed": async () => same(await streamed(compatible)),
  "ai, openai, chat": async () => same((await generateText({ model: openai.chat(model), ...asked(bytes) })).text),
  "ai, openai, responses": async () => same((await generateText({ model: openai(model), ...asked(bytes) })).text),
  "ai, anthropic": async () => same((await generateText({ model: anthropic, maxOutputTokens: 40, ...asked(bytes) })).text),
  "openai, chat": async () => {
    const content = [{ type: "text", text: question }, { type: "image_url", image_url: { url: dataURL } }];
    const chat = await client.chat.completions.create({ model, temperature: 0, messages: [{ role: "user", content }] });
    same(chat.choices[0].message.content);
  },
  "openai, responses": async () => {
    const content = [{ type: "input_text", text: question }, { type: "input_image", image_url: dataURL }];
    same((await client.responses.create({ model, temperature: 0, input: [{ role: "user", content }] })).output_text);
  },
};

await runChecks(checks);
process.exit(0);
