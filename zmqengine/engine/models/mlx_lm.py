"""The only module of the engine that imports mlx-lm, written for the releases that pyproject.toml names."""

from __future__ import annotations

import resource
from typing import Any


def _keep_limit(*_: Any) -> None:
    """Leave the limit as it is."""


# Importing mlx-lm lowers the limit on open files to 2048, the hard one to 4096, which no user can raise again: room for
# 440 front-ends. Where the hard limit is below 2048 the import fails.
_set_limit = resource.setrlimit
resource.setrlimit = _keep_limit
try:
    from mlx_lm import __version__ as mlx_lm_version
    from mlx_lm.models.base import (
        create_attention_mask,
        create_causal_mask,
        scaled_dot_product_attention,
    )
    from mlx_lm.models.cache import (
        ArraysCache,
        BatchRotatingKVCache,
        CacheList,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )
    from mlx_lm.models.deepseek_v2 import DeepseekV2YarnRotaryEmbedding as DeepseekYarnRoPE
    from mlx_lm.models.gemma4_text import DecoderLayer as Gemma4Layer
    from mlx_lm.models.gemma4_text import ModelArgs as Gemma4Args
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.qwen3 import ModelArgs as Qwen3Args
    from mlx_lm.models.qwen3 import TransformerBlock as Qwen3Layer
    from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE, initialize_rope
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.utils import _download as fetch_model
    from mlx_lm.utils import _get_classes as model_classes
    from mlx_lm.utils import load_config, load_model, load_tokenizer
finally:
    resource.setrlimit = _set_limit

__all__ = [
    "ArraysCache",
    "BatchRotatingKVCache",
    "CacheList",
    "DeepseekYarnRoPE",
    "Gemma4Args",
    "Gemma4Layer",
    "KVCache",
    "Llama3RoPE",
    "MultiLinear",
    "ProportionalRoPE",
    "QuantizedMultiLinear",
    "QuantizedSwitchLinear",
    "Qwen3Args",
    "Qwen3Layer",
    "RotatingKVCache",
    "SuScaledRoPE",
    "SwitchLinear",
    "YarnRoPE",
    "create_attention_mask",
    "create_causal_mask",
    "fetch_model",
    "initialize_rope",
    "load_config",
    "load_model",
    "load_tokenizer",
    "make_prompt_cache",
    "mlx_lm_version",
    "model_classes",
    "scaled_dot_product_attention",
]
