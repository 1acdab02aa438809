"""What can be told of a model on disk before it is loaded: its weights, its caches, whether it fits. No MLX."""
