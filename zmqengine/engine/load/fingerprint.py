"""Fingerprint of a model, independent of its name and directory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.engine.load.loader import find_arrays

# Numbers of each array, spread over it, that enter the fingerprint.
_SAMPLES = 16


def fingerprint(model: Any, directory: Path) -> str:
    """A hash of the configuration in `directory`, and of shape, type and a sample of every array within `model`.

    It differs for models that were trained or quantised differently, have a fused adapter, or another head.
    """
    whole = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    samples: list[Any] = []
    arrays = list(find_arrays(model))
    for array in arrays:
        flat = array.reshape(-1)
        samples.append(mx.contiguous(flat[:: max(1, flat.size // _SAMPLES)][:_SAMPLES]))
    mx.eval(samples)
    # Sorted, since the order of arrays is not guaranteed.
    parts = sorted(
        f"{array.dtype} {array.shape} ".encode() + memoryview(sample).tobytes()
        for array, sample in zip(arrays, samples, strict=True)
    )
    for part in parts:
        whole.update(len(part).to_bytes(4, "little") + part)
    return whole.hexdigest()
