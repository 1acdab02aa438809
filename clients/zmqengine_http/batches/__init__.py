"""Batches: files of requests that are answered behind all others."""
