"""Replay of scheduling orders without an engine: arrivals, a cost model of steps, waiting times."""
