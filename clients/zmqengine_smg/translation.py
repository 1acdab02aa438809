"""Request ids, seeds, and the stop token that ended an output."""

from __future__ import annotations

from collections.abc import Collection

from zmqengine_client import Completion

REQUEST_ID_CHARS = 64
SEED_MASK = 2**63 - 1


def worker_request_id(gateway_id: str) -> str | None:
    """A request id for the worker: the end of the gateway's id, which may be too long and is unique at its
    end."""
    return gateway_id[-REQUEST_ID_CHARS:] or None


def worker_seed(seed: int) -> int:
    """A seed in the worker's range; distinct for all 64-bit numbers up to the sign bit."""
    return seed & SEED_MASK


def matched_stop_token(completion: Completion, stop_token_ids: Collection[int]) -> int | None:
    """The last token if it ended the output and is one of the request's `stop_token_ids`, else None."""
    last = completion.tokens[-1] if completion.tokens else None
    return last if completion.finish == "stop" and last in stop_token_ids else None
