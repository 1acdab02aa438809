"""Benchmarks: the same work for our worker and for any OpenAI-compatible server, side by side in one run."""
