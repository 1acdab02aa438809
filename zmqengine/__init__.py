"""Share one GPU between many programs: an MLX inference worker that speaks ZeroMQ."""

__version__ = "0.1.0"
