"""Findings of a model: whether it can be loaded and fits in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from zmqengine.checkpoint.estimate import ModelCheckpoint, open_checkpoint
from zmqengine.checkpoint.on_disk import find_model, hub_cache
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.doctor.finding import Finding
from zmqengine.pico import BUNDLED, model_path


def look_at_model(model: str, limit_bytes: int) -> Iterator[Finding]:
    """Look at the model that `--model` names. A memory limit of 0 leaves out whether it fits."""
    directory = model_path(model) if model in BUNDLED else find_model(model)
    if directory is None:
        if model.count("/") != 1 or model.startswith((".", "~", "/")):
            yield Finding("fail", "model", f"there is no directory {model}", "give a directory or a hub id")
            return
        yield Finding("warn", "model", f"{model} is not on this machine", f"fetch it: zmqengine pull {model}")
        yield from _disk(hub_cache())
        return
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError as error:
        yield Finding("fail", "model", f"{model}: {error}")
        return
    yield Finding("ok", "model", f"{model}: {describe(checkpoint)}")
    if not (directory / "tokenizer.json").exists():
        text = f"{directory} has no tokenizer.json"
        yield Finding(
            "fail", "tokenizer", text, "take a model with a fast tokenizer, or convert it with mlx_lm.convert"
        )
    if checkpoint.missing_head:
        yield Finding("ok", "drafts", f"without a head of its own: {checkpoint.missing_head}")
    if limit_bytes:
        yield _fits(checkpoint, limit_bytes)


def describe(checkpoint: ModelCheckpoint) -> str:
    """Type, size and caches on one line."""
    parts = [checkpoint.model_type, f"{_size(checkpoint.weights.total_bytes)} of weights"]
    if checkpoint.quantisation:
        parts.append(checkpoint.quantisation)
    parts += [f"{checkpoint.shape.context_tokens:,} tokens of context", f"cache: {checkpoint.shape.kind}"]
    return ", ".join(parts)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f}G" if size >= 2**30 else f"{size / 2**20:.1f}M"


def _fits(checkpoint: ModelCheckpoint, limit_bytes: int) -> Finding:
    limit = f"{limit_bytes / 2**30:.1f}G"
    if checkpoint.kv_budget(limit_bytes) <= 0:
        text = f"its weights leave nothing of the {limit} that MLX may hold"
        return Finding("fail", "fits", text, "take a smaller model or a quantised one")
    chats = [(tokens, checkpoint.chats(limit_bytes, tokens)) for tokens in checkpoint.lengths()]
    if any(number is None for _, number in chats):
        return Finding("ok", "fits", f"in {limit}; its caches do not grow with the chat")
    chats_text = " or ".join(f"{number:,} chats of {tokens:,} tokens" for tokens, number in chats)
    if not chats[0][1]:
        text = f"not one chat of {chats[0][0]:,} tokens fits beside the weights in {limit}"
        return Finding("fail", "fits", text, "take a smaller model or a quantised one")
    if not chats[-1][1]:
        return Finding(
            "warn", "fits", f"in {limit}, for about {chats_text}", "a chat of the whole context does not fit"
        )
    return Finding("ok", "fits", f"in {limit}, for about {chats_text}")


def _disk(directory: Path) -> Iterator[Finding]:
    """Free space for a download: that of the nearest existing directory."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < 10 << 30:
        text = f"{free / 2**30:.1f}G are free in {directory}"
        yield Finding("warn", "disk", text, "set $HF_HOME to a larger disk before fetching models")
