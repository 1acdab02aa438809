"""Metrics of workers for Prometheus, read through the client library alone."""

from __future__ import annotations
