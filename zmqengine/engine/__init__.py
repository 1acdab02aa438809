"""One model and its batch: `interface.Engine`, made by MLX or faked. Nothing here knows sockets, sessions or threads.

interface.py     the contract between worker and engine: rows, tokens, memory
disk_cache.py    the contract between worker and the prefix cache on disk
options.py       options of the engine, a part of the worker's
open.py          from a model's name to an engine: the one call that the worker makes
row.py           a request in the engine: its tokens and the state of its generation
seeds.py         random numbers of a seed and an output index

step/            one step: tokens of rows in decode and slices of prompts, in one forward pass
sampling/        from logits to tokens and log-probabilities
grammar/         output that follows a grammar: compiled, matched, masked
speculation/     draft tokens: sources, policy, verify blocks
kv/              slots, where rows of our decoder keep keys and values, and their blocks
prefix_cache/    blocks of prompts that were computed before, in memory and on disk
models/          our decoder, the border to mlx-lm, and the runners of both
adapters/        LoRA adapters of rows: their files, and what they add to products
load/            weights, tokenizer, probe of a model's abilities, warm-up
autotune/        kernel variants of products and of the draw, measured on this device
cuda/            kernels in CUDA C++
metal/           kernels in the Metal Shading Language
cpu/             NumPy in place of MLX, for models in float32 on a CPU
host/            back-end, BLAS, memory limits, environment
embedding/       embeddings and rerank: texts to vectors and scores
texts/           rows of texts, and their pooling
vision/          images: towers, and their features in place of tokens
fake/            a deterministic engine without a model

`docs/engine.md` walks through a step and a verify block; `tests/test_borders.py` states which room may
import from which.
"""
