// Objects by schema with Vercel's AI SDK, from a model that is held to them: node structured_objects.mjs URL MODEL.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, tool } from "ai";
import { z } from "zod";
import { runChecks } from "./run_checks.mjs";

const baseURL = process.argv[2] + "/v1", name = process.argv[3];
const compatible = createOpenAICompatible({ name: "zmqengine", baseURL, supportsStructuredOutputs: true })(name);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const person = z.object({ name: z.string().max(12), mood: z.enum(["glad", "sad"]), age: z.number().int().min(0).max(120) });
const options = { prompt: "Tell me about Tom.", schema: person, maxRetries: 0, maxOutputTokens: 300 };
const weather = tool({ description: "The weather", inputSchema: z.object({ city: z.string().max(12), unit: z.enum(["c", "f"]) }) });

function checkPerson(found) {
  person.parse(found);
}

async function called(model) {
  const { toolCalls } = await generateText({ model, prompt: "Weather in Prague?", tools: { weather }, toolChoice: "required", maxRetries: 0, maxOutputTokens: 300 });
  if (toolCalls.length < 1) throw new Error("no call");
  for (const call of toolCalls) if (!["c", "f"].includes(call.input.unit)) throw new Error(JSON.stringify(call.input));
}

const checks = {
  "generateObject": async () => checkPerson((await generateObject({ ...options, model: compatible })).object),
  "generateObject, provider openai, chat": async () => checkPerson((await generateObject({ ...options, model: openai.chat(name) })).object),
  "generateObject, provider openai, responses": async () => checkPerson((await generateObject({ ...options, model: openai(name) })).object),
  "streamObject": async () => {
    const stream = streamObject({ ...options, model: compatible });
    let parts = 0;
    for await (const _ of stream.partialObjectStream) parts += 1;
    checkPerson(await stream.object);
    if (parts < 1) throw new Error(`${parts} parts`);
  },
  "generateObject, enum": async () => {
    const { object } = await generateObject({ model: compatible, output: "enum", enum: ["left", "right"], prompt: "Where?", maxRetries: 0 });
    if (!["left", "right"].includes(object)) throw new Error(object);
  },
  // Nothing bounds an array: a small model ends one now and then.
  "generateObject, array": async () => {
    const way = z.enum(["up", "down"]);
    for (let seed = 1; ; seed++) {
      try {
        const { object } = await generateObject({ ...options, model: compatible, output: "array", schema: way, seed, temperature: 1 });
        for (const each of object) way.parse(each);
        return;
      } catch (raised) {
        if (raised.finishReason !== "length" || seed === 10) throw raised;
      }
    }
  },
  "toolChoice required": async () => called(compatible),
  "toolChoice required, responses": async () => called(openai(name)),
};

await runChecks(checks);
