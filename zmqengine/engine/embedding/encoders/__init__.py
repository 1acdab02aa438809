"""Encoders on plain MLX, read from published safetensors: one file for each family."""
