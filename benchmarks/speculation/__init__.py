"""Speculative decoding measured: tokens per second with draft tokens against without, on several kinds of text."""
