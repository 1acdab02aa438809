"""Rows of texts, and their pooling: shared by the packed step and the engine of encoders."""
