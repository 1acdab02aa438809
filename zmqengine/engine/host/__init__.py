"""The machine: MLX back-end, BLAS, memory limits and environment."""
