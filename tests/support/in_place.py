"""Models whose layers write KV caches in place, as on CUDA."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tests.support.models import LLAMA, build_model
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import read_weights

IN_PLACE: dict[str, Any] = {**LLAMA, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}


def model_on_kernels(dtype: mx.Dtype = mx.float32) -> DecoderModel:
    """A model of this configuration. Elsewhere than on CUDA its kernels need stand-ins (`cuda_kernels`)."""
    model = build_model(IN_PLACE)
    model.set_dtype(dtype)
    return DecoderModel(read_weights(model), CudaOps())
