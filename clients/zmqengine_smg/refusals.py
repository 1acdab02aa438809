"""What the gateway may send and the worker cannot honour, and the shared small print of what it can."""

from __future__ import annotations

from zmqengine_client.errors import BadRequest

REQUEST_ID_CHARS = 64
SEED_MASK = 2**63 - 1


def refused(name: str) -> BadRequest:
    """The refusal of a parameter, by the name that the gateway's wire has for it."""
    return BadRequest(f"{name}: this backend cannot honour it; leave it out")


def worker_request_id(gateway_id: str) -> str | None:
    """An id for the worker: the gateway's may be too long, and end with what makes them unique."""
    return gateway_id[-REQUEST_ID_CHARS:] or None


def worker_seed(seed: int) -> int:
    """A seed in the worker's range. Every 64-bit number has its own but for the sign bit."""
    return seed & SEED_MASK
