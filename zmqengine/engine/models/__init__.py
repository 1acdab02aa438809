"""The border to mlx-lm: everything that is imported of it."""
