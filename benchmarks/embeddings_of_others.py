"""The other side of `benchmarks.embeddings`, in its own environment: a line of JSON a request.

`python embeddings_of_others.py mlx-embeddings|vllm-mlx MODEL CLOCK` answers each list of texts with the seconds that
its vectors took, by a clock of the module `time`.
"""

# mypy: ignore-errors
import json
import sys
import time


def mlx_embeddings(path):
    """Vectors as its README makes them: tokenized together, padded to the longest."""
    import mlx.core as mx
    from mlx_embeddings.utils import load

    # Freed buffers of all lengths would fill a device that the worker shares.
    mx.set_cache_limit(8 << 30)
    model, tokenizer = load(path)
    tokenizer = getattr(tokenizer, "_tokenizer", tokenizer)

    def embed(texts):
        inputs = tokenizer(texts, return_tensors="np", padding=True, truncation=True, max_length=256)
        made = model(mx.array(inputs["input_ids"]), attention_mask=mx.array(inputs["attention_mask"]))
        mx.eval(made.text_embeds)
        return made.text_embeds

    return embed


def vllm_mlx(path):
    """Vectors of the engine behind its /v1/embeddings."""
    from vllm_mlx.embedding import EmbeddingEngine

    engine = EmbeddingEngine(path)
    engine.load()
    return engine.embed


of, model, name = sys.argv[1:]
clock = getattr(time, name)
embed = {"mlx-embeddings": mlx_embeddings, "vllm-mlx": vllm_mlx}[of](model)
embed(["warm up"])
print("ready", flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    started = clock()
    vectors = embed(texts)
    print(json.dumps({"seconds": clock() - started, "first": [float(x) for x in vectors[0][:4]]}), flush=True)
