// LibreChat's library for models, called as its server does for a custom endpoint: node librechat.mjs URL, on the
// bundled models.
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatModelStreamHandler, GraphEvents, Providers, Run, ToolEndHandler } from "@librechat/agents";
import { z } from "zod";
import { runChecks } from "./run_checks.mjs";

const [url] = process.argv.slice(2);
const add = tool(async ({ a, b }) => String(a + b), {
  name: "add",
  description: "Add two numbers.",
  schema: z.object({ a: z.number(), b: z.number() }),
});

// The parts of the answer to a question, streamed.
async function ask(model, question, tools = []) {
  const configuration = { baseURL: `${url}/v1` };
  const llmConfig = { provider: Providers.OPENAI, model, apiKey: "none", streaming: true, streamUsage: true, configuration };
  const run = await Run.create({
    runId: crypto.randomUUID(),
    graphConfig: { type: "standard", instructions: "You are a helpful assistant.", tools, llmConfig },
    returnContent: true,
    customHandlers: {
      [GraphEvents.CHAT_MODEL_STREAM]: new ChatModelStreamHandler(),
      [GraphEvents.TOOL_END]: new ToolEndHandler(),
    },
  });
  const config = { configurable: { thread_id: "talk" }, runId: crypto.randomUUID(), streamMode: "values", version: "v2" };
  return run.processStream({ messages: [new HumanMessage(question)] }, config);
}

const textOf = (parts) => parts.map((part) => part.text ?? "").join("");

function holds(condition, what) {
  if (!condition) throw new Error(JSON.stringify(what));
}

await runChecks({
  async chat() {
    const parts = await ask("pico", "Tell me a story.");
    holds(textOf(parts).length > 20, parts);
  },
  async "tools offered to a model that takes none"() {
    const parts = await ask("pico", "Tell me a story.", [add]);
    holds(textOf(parts).length > 20, parts);
  },
  async "a tool that is called"() {
    const parts = await ask("pico-tools", "What is 417 + 2385?", [add]);
    const call = parts.find((part) => part.type === "tool_call")?.tool_call;
    holds(call?.name === "add" && call.args.a === 417 && call.output === "2802", parts);
    holds(textOf(parts).includes("2802"), parts);
  },
});
process.exit(0);
