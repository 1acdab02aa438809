"""Reads a prompt of every usual shape once, so that none has to wait until the device has seen its like."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.autotune import attention
from zmqengine.engine.load import prompt_sizes
from zmqengine.engine.row import Caches

log = logging.getLogger("zmqengine.engine")

_LONG_TOKENS = 8192
_CHUNK = 1024
_TOKEN = 1


def read_shapes(model: Any, context: int, until_s: float) -> int:
    """Take `model` through the shapes in which prompts are read, until `until_s` at most; returns how many were read.

    Its caches must all be plain. The time is that of `time.perf_counter`.
    """
    shapes = list(prompt_sizes.usual_shapes(min(context, _LONG_TOKENS)))
    long = kv.new_caches(model)
    for done, (tokens, before) in enumerate(shapes):
        if time.perf_counter() > until_s:
            log.info("warming up ended before all sizes of prompts", extra={"done": done, "of": len(shapes)})
            return done
        while long[0].offset < before:
            _read(model, long, _CHUNK, plans=False)
        _read(model, kv.beginning(long, before), tokens, plans=before % prompt_sizes.WHOLE == 0)
    return len(shapes)


def _read(model: Any, caches: Caches, tokens: int, *, plans: bool) -> None:
    with attention.planning() if plans else nullcontext():
        kv.read_alone(model, caches, [_TOKEN] * tokens)
    mx.eval(kv.arrays(caches))
