// The embeddings of the official JavaScript client: node openai_node_embeddings.mjs URL, one JSON line a check.
import OpenAI from "openai";
import { runChecks } from "./run_checks.mjs";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0, timeout: 30000 });
const model = "embedder";

function expect(holds, otherwise) {
  if (!holds) throw new Error(otherwise);
}

const checks = {
  async "by default"() {
    const made = await client.embeddings.create({ model, input: ["abc", "d", "abc"] });
    expect(made.data.length === 3 && made.data[0].embedding.length === 24, JSON.stringify(made).slice(0, 300));
    expect(Math.abs(made.data[0].embedding[0] - made.data[2].embedding[0]) < 1e-6, "equal texts differ");
    expect(made.usage.total_tokens > 0, "no usage");
  },
  async float() {
    const floats = await client.embeddings.create({ model, input: "abc", encoding_format: "float" });
    const packed = await client.embeddings.create({ model, input: "abc", encoding_format: "base64" });
    const read = new Float32Array(Uint8Array.from(Buffer.from(packed.data[0].embedding, "base64")).buffer);
    expect(Math.abs(read[3] - floats.data[0].embedding[3]) < 1e-6, "the encodings differ");
  },
  async dimensions() {
    expect((await client.embeddings.create({ model, input: "abc", dimensions: 5 })).data[0].embedding.length === 5, "not 5");
  },
  async "too long"() {
    const error = await client.embeddings.create({ model, input: "a".repeat(100) }).catch((error) => error);
    expect(error.status === 400 && error.message.includes("over the 64"), String(error));
  },
};

await runChecks(checks);
