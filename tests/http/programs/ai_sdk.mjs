// Vercel's AI SDK against a front-end: node ai_sdk.mjs URL, one JSON line a check.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { runChecks } from "./run_checks.mjs";

const baseURL = process.argv[2] + "/v1";
const compatible = createOpenAICompatible({ name: "zmqengine", baseURL })("scripted");
const openai = createOpenAI({ baseURL, apiKey: "none" });
const tools = {
  add: tool({ description: "Add", inputSchema: z.object({ a: z.number(), b: z.number() }), execute: async ({ a, b }) => String(a + b) }),
};

function same(found, wanted) {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
}

async function text(model, options = {}) {
  return (await generateText({ model, prompt: "Hello", maxRetries: 0, ...options })).text;
}

async function streamed(model, options = {}) {
  let all = "", failure;
  const stream = streamText({ model, prompt: "Hello", maxRetries: 0, onError: ({ error }) => (failure = error), ...options });
  for await (const piece of stream.textStream) all += piece;
  if (failure) throw failure;
  return all;
}

const loop = { tools, stopWhen: stepCountIs(3) };
const checks = {
  "generateText": async () => same(await text(compatible), "You said: Hello"),
  "generateText, maxOutputTokens 32000": async () => same(await text(compatible, { maxOutputTokens: 32000 }), "You said: Hello"),
  "streamText": async () => same(await streamed(compatible), "You said: Hello"),
  "tool loop": async () => same(await text(compatible, loop), "It is 3."),
  "tool loop, streamed": async () => same(await streamed(compatible, loop), "It is 3."),
  "provider openai, chat": async () => same(await text(openai.chat("scripted")), "You said: Hello"),
  "provider openai, completion": async () => {
    await text(openai.completion("scripted"));
  },
  "provider openai, responses": async () => same(await text(openai("scripted")), "You said: Hello"),
  "provider openai, responses streamed": async () => same(await streamed(openai("scripted")), "You said: Hello"),
  "provider openai, responses tool loop": async () => same(await text(openai("scripted"), loop), "It is 3."),
  "toolChoice required": async () => same(await text(compatible, { ...loop, toolChoice: "required", stopWhen: stepCountIs(1) }), ""),
  "generateObject": async () => {
    await generateObject({ model: compatible, prompt: "Hello", schema: z.object({ sum: z.number() }), maxRetries: 0 });
  },
};

await runChecks(checks, 20_000);
