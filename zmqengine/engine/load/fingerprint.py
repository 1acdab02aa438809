"""Tells one model from another by what it computes with, wherever it lies and whatever it is called."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.engine.load.loader import find_arrays

_SAMPLES = 16


def fingerprint(model: Any, directory: Path) -> str:
    """A hash of the configuration in `directory`, and of shape, type and some numbers of every array of `model`.

    Models that were trained differently, quantised differently or have an adapter in them differ in it.
    """
    whole = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    samples: list[Any] = []
    arrays = list(find_arrays(model))
    for array in arrays:
        flat = array.reshape(-1)
        samples.append(mx.contiguous(flat[:: max(1, flat.size // _SAMPLES)][:_SAMPLES]))
    mx.eval(samples)
    # Sorted: nobody promises in which order arrays are found.
    parts = sorted(
        f"{array.dtype} {array.shape} ".encode() + memoryview(sample).tobytes()
        for array, sample in zip(arrays, samples, strict=True)
    )
    for part in parts:
        whole.update(len(part).to_bytes(4, "little") + part)
    return whole.hexdigest()
