"""Processes a benchmark starts: workers, front-ends, `mlx_lm.server`, the SMG gateway, a bare generator."""
