"""Servers under test, over ZeroMQ or HTTP: sessions, streams and records of requests."""
