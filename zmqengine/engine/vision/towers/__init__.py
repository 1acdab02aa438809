"""Towers of our own, one file a family, with the arrays that mlx-lm leaves in the checkpoint."""
