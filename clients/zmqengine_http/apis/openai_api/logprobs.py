"""What the log-probabilities of both endpoints have in common."""

LOWEST = -9999.0
"""Stands for minus infinity, as in OpenAI's API."""
