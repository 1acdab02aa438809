"""The worker: one process, one model, one actor loop."""
