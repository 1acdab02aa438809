"""Prompts, closed and open loops, load processes, and the figures computed from records."""
