"""Sampling: from logits to tokens and log-probabilities. Independent of KV caches, speculation and kernels.

sampler.py    Sampler: bias and penalties, a mask, the draw, log-probabilities
draw.py       the draw itself, by MLX's own operations; back-ends may inject another
penalties.py  logit bias and penalties
"""
