"""Text models of checkpoints that see: the class of `text_config`, and its arrays without those of the tower.

mlx-lm knows some of these checkpoints, in one of the forms in which they are published. Here one rule for names reads
all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from zmqengine.checkpoint.text_config import text_config
from zmqengine.engine.models.mlx_lm import model_classes
from zmqengine.engine.models.positions import CallPositions

ModelClasses = Callable[[dict[str, Any]], tuple[type[Any], type[Any]]]

_TOWER = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_encoder|vision_projection|visual|multi_modal_projector|connector|mlp1)\."
)
_TRUNK = "language_model."


def classes_of(directory: Path) -> ModelClasses:
    """`text_classes` of a checkpoint."""
    # Configs contradict themselves on tied embeddings; the arrays do not.
    files = sorted(directory.glob("model*.safetensors"))
    is_tied = not any("lm_head." in str(name) for file in files for name in mx.load(str(file)))
    return lambda config: text_classes(config, is_tied=is_tied)


def text_classes(config: dict[str, Any], *, is_tied: bool) -> tuple[type[Any], type[Any]]:
    """Classes for mlx-lm's `load_model`: the text model as `language_model`, as quantised checkpoints name it.

    `is_tied`: its head has the arrays of its embedding.
    """
    text = text_config(config)
    text["tie_word_embeddings"] = is_tied
    made, arguments = model_classes(text)

    class SeeingText(Module):
        """A text model that takes embeddings in place of tokens."""

        def __init__(self, given: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.args = given
            self.model_type = given.model_type
            self.language_model = made(given)
            if hasattr(self.language_model, "make_cache"):
                self.make_cache = self.language_model.make_cache

        def __call__(
            self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
        ) -> mx.array:
            logits: mx.array = self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)
            return logits

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Arrays of the text model by this model's names."""
            own = {text_name(name): array for name, array in weights.items() if not _TOWER.match(name)}
            own = split_experts(own, text)
            if "lm_head" not in self.language_model:
                own = {name: array for name, array in own.items() if not name.startswith("lm_head.")}
            if hasattr(self.language_model, "sanitize"):
                own = self.language_model.sanitize(own)
            return {f"{_TRUNK}{name}": array for name, array in own.items()}

        @property
        def layers(self) -> Any:
            """The layers, for caches."""
            return self.language_model.layers

    class Arguments:
        """The arguments of the text model, from the config of the whole."""

        @classmethod
        def from_dict(cls, whole: dict[str, Any]) -> Any:
            """Arguments, as mlx-lm's loader asks for them."""
            return arguments.from_dict(text)

    return SeeingText, Arguments


def placed_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """mlx-lm's classes of a model, which may be called with three positions for a token once `places` is set."""
    made, arguments = model_classes(config)

    class PlacedText(made):  # type: ignore[valid-type, misc]
        """A text model whose rotary embeddings read the positions of `places`."""

        places: CallPositions | None = None

        def __call__(
            self,
            inputs: mx.array,
            cache: Any = None,
            input_embeddings: mx.array | None = None,
            positions: mx.array | None = None,
            shift: mx.array | None = None,
        ) -> mx.array:
            places = nullcontext() if self.places is None else self.places.within(positions, shift)
            with places:
                logits: mx.array = super().__call__(inputs, cache=cache, input_embeddings=input_embeddings)
            return logits

    return PlacedText, arguments


def split_experts(arrays: dict[str, mx.array], text: dict[str, Any]) -> dict[str, mx.array]:
    """Arrays in which all experts of a layer are one, as Qwen3-VL's mixtures have them, under mlx-lm's names.

    Published are [experts, inputs, outputs]; transformers keeps outputs first.
    """
    found = dict(arrays)
    for name in [name for name in arrays if name.endswith(".experts.gate_up_proj")]:
        prefix = name.removesuffix("experts.gate_up_proj")
        joined, down = found.pop(name), found.pop(f"{prefix}experts.down_proj")
        # The down projection of an expert as wide as the model is square: then the joined one tells the order.
        is_square = down.shape[-1] == down.shape[-2]
        is_transposed = (
            joined.shape[-2] == text["hidden_size"] if is_square else down.shape[-1] == text["hidden_size"]
        )
        if is_transposed:
            joined, down = joined.swapaxes(-2, -1), down.swapaxes(-2, -1)
        gate, up = mx.split(joined, 2, axis=-2)
        for part, array in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            found[f"{prefix}switch_mlp.{part}.weight"] = array
    return found


def text_name(name: str) -> str:
    """A name in the text model itself: "model.layers..." or "lm_head...".

    Published are "language_model.model.layers", "model.language_model.layers", "model.text_model.layers",
    "language_model.layers" and "model.layers".
    """
    for part in ("model.", "language_model.", "text_model."):
        name = name.removeprefix(part)
    name = name.removeprefix("model.")
    return name if name.startswith("lm_head.") else f"model.{name}"
