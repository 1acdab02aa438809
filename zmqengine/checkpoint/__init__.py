"""Facts of a model on disk before it is loaded: weights, KV caches, whether it fits in memory. No MLX."""
