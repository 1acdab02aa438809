// An image through the AI SDK and, where they are installed, its other providers and OpenAI's client for Node:
// node images.mjs URL BASE64, one JSON line a check.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { runChecks } from "./run_checks.mjs";

const [, , url, data] = process.argv;
const baseURL = url + "/v1";
const wanted = "A red circle.";
const question = "What do you see?";
const model = "pico-eye";
const bytes = Buffer.from(data, "base64");
const dataURL = `data:image/png;base64,${data}`;
const compatible = createOpenAICompatible({ name: "zmqengine", baseURL })(model);

function same(found) {
  if (found !== wanted) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
}

function asked(image) {
  return { messages: [{ role: "user", content: [{ type: "text", text: question }, { type: "image", image }] }], temperature: 0, maxRetries: 0 };
}

async function installed(name) {
  try {
    return await import(name);
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND") throw error;
  }
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
};

const providers = await installed("@ai-sdk/openai");
if (providers) {
  const openai = providers.createOpenAI({ baseURL, apiKey: "none" });
  checks["ai, openai, chat"] = async () => same((await generateText({ model: openai.chat(model), ...asked(bytes) })).text);
  checks["ai, openai, responses"] = async () => same((await generateText({ model: openai(model), ...asked(bytes) })).text);
}
const messages = await installed("@ai-sdk/anthropic");
if (messages) {
  const anthropic = messages.createAnthropic({ baseURL, apiKey: "none" })(model);
  checks["ai, anthropic"] = async () => same((await generateText({ model: anthropic, maxOutputTokens: 40, ...asked(bytes) })).text);
}
const own = await installed("openai");
if (own) {
  const client = new own.default({ baseURL, apiKey: "none", maxRetries: 0 });
  checks["openai, chat"] = async () => {
    const content = [{ type: "text", text: question }, { type: "image_url", image_url: { url: dataURL } }];
    const chat = await client.chat.completions.create({ model, temperature: 0, messages: [{ role: "user", content }] });
    same(chat.choices[0].message.content);
  };
  checks["openai, responses"] = async () => {
    const content = [{ type: "input_text", text: question }, { type: "input_image", image_url: dataURL }];
    same((await client.responses.create({ model, temperature: 0, input: [{ role: "user", content }] })).output_text);
  };
}

await runChecks(checks);
process.exit(0);
