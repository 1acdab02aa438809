"""Chooses how slots hold keys and values: with all bits, or in 8."""

from __future__ import annotations

import logging

import mlx.core as mx

from zmqengine.engine.kv.packed_blocks import PackedBlocks
from zmqengine.engine.models.model_runner import ModelRunner
from zmqengine.engine.models.slot_runner import SlotRunner

log = logging.getLogger("zmqengine.engine")


def with_kv_bits(runner: ModelRunner, model: str, *, is_gpu: bool) -> tuple[ModelRunner, str]:
    """The runner with slots in 8 bits, where it can read them, and what `--kv-bits 8` gains, for people."""
    reason = _why_wide(runner, is_gpu=is_gpu)
    if reason:
        gained = f"8 bits at rest only: {reason}"
        if runner.blocks is None or not any(PackedBlocks(runner.blocks).group_sizes):
            gained = "8 bits gain nothing: no cache of this model has numbers in groups of 32 that are cut by tokens"
        log.warning("keys and values of running requests keep all bits", extra={"model": model, "kv": gained})
        return runner, gained
    assert isinstance(runner, SlotRunner), "other runners have no slots"
    packed = runner.in_8_bits()
    share = packed.blocks.token_bytes / runner.blocks.token_bytes
    gained = f"8 bits in slots and at rest, {share:.0%} of the bytes: all layers but the last"
    if runner.slots.states is not None:
        gained += ", recurrent states as they were"
    log.info("keys and values are in 8 bits", extra={"model": model, "kv": gained})
    return packed, gained


def _why_wide(runner: ModelRunner, *, is_gpu: bool) -> str:
    """Why slots keep all bits; empty where they do not."""
    if not isinstance(runner, SlotRunner):
        return "the model's own code runs it, on caches with all bits"
    if not runner.decoder.mixing.reads_packed:
        return "kernels for this device read all bits"
    if not any(shape.group_size for shape in runner.in_8_bits().slots.shapes):
        return "no layer but the last has keys and values apart whose head dimension 32 divides"
    if not is_gpu and any(shape.dtype != mx.float32 for shape in runner.slots.shapes):
        # 163 ms a layer for 16,384 columns in bfloat16, with all bits 27; in float32 both take 10.
        return "on a CPU products with packed columns are slow but in float32"
    return ""
