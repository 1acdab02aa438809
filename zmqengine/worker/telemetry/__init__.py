"""Counters, latency histograms and the status that the control thread reads."""
