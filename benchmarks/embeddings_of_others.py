"""The other side of `benchmarks.embeddings`: mlx-embeddings in its own environment, a line of JSON a request.

`python embeddings_of_others.py MODEL` answers each list of texts with the seconds that its vectors took.
"""

# mypy: ignore-errors
import json
import sys
import time

import mlx.core as mx
from mlx_embeddings.utils import load

model, tokenizer = load(sys.argv[1])
tokenizer = getattr(tokenizer, "_tokenizer", tokenizer)


def embed(texts):
    """As its README does: tokenized together, padded to the longest."""
    inputs = tokenizer(texts, return_tensors="np", padding=True, truncation=True, max_length=256)
    made = model(mx.array(inputs["input_ids"]), attention_mask=mx.array(inputs["attention_mask"]))
    mx.eval(made.text_embeds)
    return made.text_embeds


embed(["warm up"])
print("ready", flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    vectors = embed(json.loads(line))
    print(
        json.dumps({"seconds": time.perf_counter() - started, "first": vectors[0][:4].tolist()}), flush=True
    )
