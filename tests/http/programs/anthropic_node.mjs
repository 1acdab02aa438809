// Anthropic's SDK for JavaScript, LangChain's and Vercel's on Messages: node anthropic_node.mjs URL MODEL, a line a check.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";
import { runChecks } from "./run_checks.mjs";

const [url, model] = process.argv.slice(2);
const claude = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const hello = [{ role: "user", content: "Hello" }];
const question = [{ role: "user", content: "What time is it in Seville?" }];
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "current_time", description: "Tells what time it is.", input_schema: schema }];
const asked = { model, max_tokens: 60, temperature: 0 };
const wanted = (condition, found) => { if (!condition) throw new Error(JSON.stringify(found)); };
const ai = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model);
const chat = (useResponsesApi) =>
  new ChatOpenAI({ model, apiKey: "none", configuration: { baseURL: `${url}/v1` }, maxTokens: 60, temperature: 0, useResponsesApi });

const checks = {
  "create": async () => { const { content } = await claude.messages.create({ ...asked, messages: hello }); wanted(content[0].text, content); },
  "stream helper": async () => { const { stop_reason: reason } = await claude.messages.stream({ ...asked, messages: hello }).finalMessage(); wanted(reason === "end_turn", reason); },
  "stream": async () => {
    const types = [];
    for await (const event of await claude.messages.create({ ...asked, messages: hello, stream: true })) types.push(event.type);
    wanted(types.at(-1) === "message_stop", types);
  },
  "tool loop": async () => {
    const first = await claude.messages.create({ ...asked, tools, messages: question });
    wanted(first.stop_reason === "tool_use", first);
    const { id } = first.content.find((block) => block.type === "tool_use");
    const result = { role: "user", content: [{ type: "tool_result", tool_use_id: id, content: "noon" }] };
    const last = await claude.messages.create({ ...asked, tools, messages: [...question, { role: "assistant", content: first.content }, result] });
    wanted(last.content[0].text.includes("noon"), last);
  },
  "tool_choice any": async () => { const found = await claude.messages.create({ ...asked, tools, tool_choice: { type: "any" }, messages: hello }); wanted(found.stop_reason === "tool_use", found); },
  "countTokens": async () => { const found = await claude.messages.countTokens({ model, messages: hello }); wanted(found.input_tokens > 0, found); },
  "models": async () => { wanted((await claude.models.list()).data[0].id === model && (await claude.models.retrieve(model)).id === model); },
  "prefill": async () => { const found = await claude.messages.create({ ...asked, messages: [...hello, { role: "assistant", content: "Once" }] }); wanted(found.content[0].text, found); },
  "an error is the client's own": async () => {
    const error = await claude.messages.create({ ...asked, model: "nosuch", messages: hello }).catch((each) => each);
    wanted(error instanceof Anthropic.NotFoundError, error);
  },
  "abort": async () => {
    const stream = claude.messages.stream({ ...asked, max_tokens: 400, messages: hello });
    stream.abort();
    const error = await stream.finalMessage().catch((each) => each);
    wanted(error instanceof Anthropic.APIUserAbortError, error);
  },
  "ai, generateText": async () => { wanted((await generateText({ model: ai, prompt: "Hello", maxOutputTokens: 60 })).text); },
  "ai, streamText": async () => { wanted(await streamText({ model: ai, prompt: "Hello", maxOutputTokens: 60 }).text); },
  "ai, tool": async () => {
    const current = tool({ description: "Tells what time it is.", inputSchema: z.object({ city: z.string() }), execute: async () => "noon" });
    const found = await generateText({ model: ai, prompt: question[0].content, maxOutputTokens: 60, temperature: 0, tools: { current_time: current } });
    wanted(found.toolResults[0].output === "noon", found.content);
  },
};
for (const responses of [false, true]) {
  const api = responses ? "responses" : "chat";
  checks[`langchain ${api}`] = async () => { wanted((await chat(responses).invoke("Hello")).content.length); };
  checks[`langchain ${api}, streamed`] = async () => { let count = 0; for await (const _ of await chat(responses).stream("Hello")) count += 1; wanted(count > 1, count); };
  checks[`langchain ${api}, tools`] = async () => {
    const offered = [{ type: "function", function: { name: "current_time", description: "Tells what time it is.", parameters: schema } }];
    const found = await chat(responses).bindTools(offered).invoke(question[0].content);
    wanted(found.tool_calls[0].args.city === "Seville", found.tool_calls);
  };
}
await runChecks(checks);
