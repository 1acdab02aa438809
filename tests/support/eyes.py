"""Random models that see, of a few kilobytes, and what mlx-lm makes of their images in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from tests.support.engines import engine_options, once, runner_of
from tests.support.images import Picture, prompt_of
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.engine.interface import ModelInfo, RowRequest
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.open import find_device
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.engine.vision.eye import Embed, Eye
from zmqengine.engine.vision.tower import Tower
from zmqengine.engine.vision.towers.muse_spark import MuseSparkTower
from zmqengine.vision_card import VisionCard

HALF = (0.5, 0.5, 0.5)
MUSE: dict[str, Any] = {
    "model_type": "muse_spark",
    "image_token_id": 300,
    "text_config": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_hidden_size": 32,
        "moe_intermediate_size": 32,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "patch_size": 4,
        "patch_temporal": 2,
        "merge_size": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
}
CARD = VisionCard(
    kind="muse_spark",
    patch=4,
    merge=2,
    resize="cells",
    placeholder=300,
    token=300,
    pixels_min=64,
    pixels_max=64 * 64,
    begin=[301],
    end=[302],
)


def build_muse(seed: int = 0) -> Any:
    """A random Muse Spark. Its text runs on Metal alone, its tower everywhere."""
    return build_model(MUSE, seed)


def tower() -> MuseSparkTower:
    """A tower with features as wide as the models of tests.support.models."""
    return MuseSparkTower(once(build_model, "muse", build_muse), HALF, HALF)


def embed_of(runner: Any) -> Embed:
    """The embeddings of a text model, ours or mlx-lm's."""
    return runner.decoder.embed if isinstance(runner, SlotRunner) else runner.model.model.embed_tokens


def make_seeing_engine(
    model: Any,
    *,
    context_tokens: int = 2048,
    watched: Tower | None = None,
    images_bytes_max: int = 1 << 20,
    ours: bool = True,
    **options: Any,
) -> MlxEngine:
    """An engine on a text model of tests.support.models, run by our decoder or, not `ours`, by mlx-lm's code, with a
    tower's features in its prompts."""
    runner = runner_of(model, "auto" if ours else "mlx-lm", context_tokens)
    info = ModelInfo(
        "eye", VOCAB_SIZE, context_tokens, frozenset(), 0, vision=CARD, image_patches_max=CARD.patches_max
    )
    options.setdefault("device", find_device())
    return MlxEngine(
        runner,
        info,
        engine_options(options),
        eye=Eye(CARD, watched or tower(), embed_of(runner)),
        images_bytes_max=images_bytes_max,
        **options,
    )


def request_of(row: int, *parts: Sequence[int] | Picture, **fields: Any) -> RowRequest:
    """A row of texts and pictures."""
    prompt, places = prompt_of(*parts)
    return RowRequest(row, prompt, images=[one.row_image(at) for one, at in places], **fields)


def image_of(picture: Picture) -> mx.array:
    """The picture as mlx-lm takes it: (3, height, width), normalised."""
    (rows, columns), side = picture.grids[0], picture.card.patch
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(rows, columns, side, side, 3)
    image = pixels.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)
    return (mx.array(image).astype(mx.float32) / 255 - 0.5) / 0.5


def greedy_with_images(model: Any, count: int, *parts: Sequence[int] | Picture) -> list[int]:
    """Tokens by mlx-lm's own code for a prompt with features of its own tower, in one call and alone."""
    prompt, places = prompt_of(*parts)

    def generate() -> list[int]:
        tokens, muse = mx.array(prompt), once(build_model, "muse", build_muse)
        embedded = model.model.embed_tokens(tokens)
        for one, at in places:
            features = muse.encode_image(image_of(one))
            start = at + len(CARD.begin)
            embedded[start : start + len(features)] = features.astype(embedded.dtype)
        steps = generate_step(tokens, model, max_tokens=count, input_embeddings=embedded)
        return [int(token) for _, (token, _) in zip(range(count), steps, strict=False)]

    hashes = tuple(one.hash for one, _ in places)
    return list(once(model, ("greedy", tuple(prompt), hashes, count), generate))
