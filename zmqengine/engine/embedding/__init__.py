"""Embeddings and scores: texts of many rows become vectors, a bounded batch a step.

`engine.py` is the engine; `encoders/` are models of their own on plain
MLX, `decoders.py` takes the hidden states of a model that mlx-lm has loaded.
"""
