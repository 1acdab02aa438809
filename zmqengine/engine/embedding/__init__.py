"""Embeddings and scores of encoders, and the opening of models that make vectors.

`engine.py` is the engine of encoders; `encoders/` are models of their own on plain MLX. A model that generates reads
texts in the steps of its rows (`step/texts.py`).
"""
