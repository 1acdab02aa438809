"""Rows of texts, and their pooling: shared by the steps of decoders and the engine of encoders."""
