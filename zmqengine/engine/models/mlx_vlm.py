"""The only module of the engine that imports mlx-vlm, an extra: language models of families that mlx-lm lacks.

Their caches are classes of mlx-vlm. Plain ones become those of mlx-lm, which batches and blocks know, if the model
computes the same with them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from zmqengine.engine.models.mlx_lm import ArraysCache, CacheList, KVCache, RotatingKVCache

Caches = list[Any]


def load_text_model(directory: Path) -> tuple[Any, dict[str, Any]]:
    """The language model of a checkpoint, its arrays not read yet, and the config. Raises what mlx-vlm raises."""
    from mlx_vlm.utils import load_config, load_model

    whole = load_model(directory, lazy=True)
    return VlmText(getattr(whole, "language_model", whole)), load_config(directory)


class VlmText(Module):
    """A language model of mlx-vlm, called as those of mlx-lm are. `own_caches`: plain caches are mlx-vlm's, too."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.language_model = language_model
        self.args = getattr(language_model, "args", None)
        self.model_type = getattr(language_model, "model_type", "")
        self.own_caches = True

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if hasattr(self.language_model, "_rope_deltas"):
            # Left behind by the last row with images, in whose place another one may stand.
            self.language_model._rope_deltas = mx.zeros((inputs.shape[0], 1), mx.int32)
        logits: mx.array = self.language_model(inputs, cache=cache).logits
        return logits

    @property
    def layers(self) -> Any:
        """The layers, for caches."""
        return self.language_model.layers

    def make_cache(self) -> Caches:
        """Empty caches for one row."""
        from mlx_vlm.models.cache import make_prompt_cache

        caches = list(make_prompt_cache(self.language_model))
        return caches if self.own_caches else [_of_mlx_lm(cache) for cache in caches]


def _of_mlx_lm(cache: Any) -> Any:
    """mlx-lm's empty cache for one of mlx-vlm's; that one itself where mlx-lm has none of its kind."""
    from mlx_vlm.models import cache as theirs

    makers: dict[type, Callable[[], Any]] = {
        theirs.KVCache: KVCache,
        theirs.RotatingKVCache: lambda: RotatingKVCache(max_size=cache.max_size, keep=cache.keep),  # type: ignore[no-untyped-call]
        theirs.ArraysCache: lambda: ArraysCache(len(cache.cache)),
        theirs.CacheList: lambda: CacheList(*map(_of_mlx_lm, cache.caches)),  # type: ignore[no-untyped-call]
    }
    # A subclass has its own reason to be one.
    make = makers.get(type(cache))
    return cache if make is None else make()
