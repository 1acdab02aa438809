"""Metrics of workers for Prometheus: a front-end like any other, on the client library alone."""

from __future__ import annotations

from zmqengine_metrics.families import families
from zmqengine_metrics.snapshot import Snapshot

__all__ = ["Snapshot", "families"]
