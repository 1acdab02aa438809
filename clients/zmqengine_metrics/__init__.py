"""Metrics of workers for Prometheus: a front-end like any other, on the client library alone."""

from __future__ import annotations
