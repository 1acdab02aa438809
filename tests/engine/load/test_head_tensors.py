"""Heads are found by their tensors, in every form in which checkpoints have them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mlx.nn.layers.quantized import quantize

from tests.support.engines import runner_of
from tests.support.heads import head_module, tensors_of_head
from tests.support.models import build_model, save_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.checkpoint.estimate import open_checkpoint
from zmqengine.checkpoint.head_files import head_beginning, missing_head
from zmqengine.cli.commands.models import models
from zmqengine.doctor.model import look_at_model
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.head_tensors import read_head_tensors
from zmqengine.engine.models.draft_head import DraftHead
from zmqengine.engine.models.families import read_head
from zmqengine.engine.models.layers import Unsupported
from zmqengine.engine.models.tree import arrays_of
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions

MIXTURE = ARCHITECTURES["qwen3_5 mixture"]


def saved(
    directory: Path, config: dict[str, Any], tensors: dict[str, mx.array], *, beside: bool = True
) -> Path:
    """A model with the tensors of a head in `mtp.safetensors`, or in the model's own file."""
    save_model(directory, config)
    if beside:
        mx.save_safetensors(str(directory / "mtp.safetensors"), tensors)
    else:
        file = str(directory / "model.safetensors")
        whole: Any = mx.load(file)
        whole = {name: mx.array(np.array(array)) for name, array in whole.items()}
        mx.save_safetensors(file, {**whole, **tensors})
    return directory


def head_tensors(config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors of a random head of such a model."""
    model = build_model(config)
    return tensors_of_head(model, head_module(model))


def published(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Tensors as a head is published: norms without their 1."""
    return {
        name: array - 1 if array.ndim == 1 and "norm" in name else array for name, array in tensors.items()
    }


def half_converted(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Tensors as a conversion leaves them that treats a head's layer as the model's, and knows no other norm of it."""
    found = published(tensors)
    return found | {name: array for name, array in tensors.items() if name.startswith("layers.")}


def by_expert(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for name, array in tensors.items():
        before, mark, after = name.partition("switch_mlp.")
        if not mark:
            found[name] = array
            continue
        found |= {f"{before}experts.{number}.{after}": each for number, each in enumerate(array)}
    return found


def fused(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    before = "layers.0.mlp.switch_mlp."
    found = {name: array for name, array in tensors.items() if before not in name}
    gate, up = (tensors[f"{before}{name}_proj.weight"] for name in ("gate", "up"))
    found["layers.0.mlp.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
    found["layers.0.mlp.experts.down_proj"] = tensors[f"{before}down_proj.weight"]
    return found


@pytest.mark.parametrize("form", [dict, published, half_converted, by_expert, fused])
def test_a_head_has_the_same_weights_in_every_form(form):
    """As converted, as published, between these, with a tensor for each expert or one for all. Nothing but the tensors
    tells: a head that was published may lie beside a converted model."""
    model = build_model(MIXTURE)
    tensors = tensors_of_head(model, head_module(model))
    wanted = arrays_of(read_head(model, tensors))
    found = arrays_of(read_head(model, form(tensors)))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert mx.allclose(one, other, atol=1e-6).item()


@pytest.mark.parametrize(
    ("bits", "group_size", "mode"), [(4, 32, "affine"), (8, 64, "affine"), (4, 32, "mxfp4")]
)
def test_a_quantised_head_is_told_by_the_shapes_of_its_tensors(bits, group_size, mode):
    """The config speaks of the model alone."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    head = head_module(model)
    quantize(head, group_size=group_size, bits=bits, mode=mode)
    weights = read_head(model, tensors_of_head(model, head))
    assert (weights.join.bits, weights.join.group_size, weights.join.mode) == (bits, group_size, mode)
    assert DraftHead(weights, runner_of(model, "mlx").decoder).parameter_bytes > 0


def test_tensors_of_another_head_are_refused_by_name():
    """One layer is known."""
    model = build_model(ARCHITECTURES["qwen3_5"])
    tensors = tensors_of_head(model, head_module(model))
    tensors["layers.1.input_layernorm.weight"] = tensors["norm.weight"]
    with pytest.raises(Unsupported, match=r"layers\.1"):
        read_head(model, tensors)
    with pytest.raises(Unsupported, match="llama"):
        read_head(build_model(), tensors)


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp."])
def test_a_model_with_a_head_drafts_by_it(tmp_path, prefix):
    """From the files to the tokens; a config without a promise is no reason against."""
    config = ARCHITECTURES["qwen3_5"]
    tensors = head_tensors(config)
    named = {prefix + name: array for name, array in tensors.items()}
    directory = saved(tmp_path / "model", config, named, beside=prefix == "mtp.")
    opened = open_mlx_engine(str(directory), EngineOptions(rows_max=1, warm_up_s=0))
    assert opened.facts["draft_head"] == "the model's own"
    engine = opened.engine
    assert engine.insert([RowRequest(0, [1, 2, 3, 4], 12)]) == []
    # Whether it gains is measured; that it drafts is shown by its time.
    source = engine._speculator.model if engine._speculator is not None else None
    assert source is not None
    assert source.name == "head"
    assert source.times.of(1) > 0
    tokens: list[int] = []
    while len(tokens) < 12:
        tokens += [token.token for token in engine.next().tokens]
    engine.close()
    plain = open_mlx_engine(str(directory), EngineOptions(rows_max=1, warm_up_s=0, speculate="off"))
    assert "draft_head" not in plain.facts
    assert plain.engine.insert([RowRequest(0, [1, 2, 3, 4], 12)]) == []
    wanted: list[int] = []
    while len(wanted) < 12:
        wanted += [token.token for token in plain.engine.next().tokens]
    plain.engine.close()
    assert tokens == wanted
    assert engine.memory().weights > plain.engine.memory().weights


@pytest.mark.parametrize(
    ("name", "beginning"), [("glm4_moe", "model.layers.3."), ("mimo", "model.mtp_layers.0.")]
)
def test_heads_of_other_families_are_read_as_they_are_published(tmp_path, name, beginning):
    """Each expert apart, and with what the model has too; the choice of experts stays in float32."""
    config = ARCHITECTURES[name]
    model = build_model(config)
    model.set_dtype(mx.bfloat16)
    tensors = head_tensors(config)
    published = {beginning + within: array for within, array in by_expert(tensors).items()}
    if name == "glm4_moe":
        embedding = mx.zeros((config["vocab_size"], config["hidden_size"]))
        published |= {f"{beginning}{part}.weight": embedding for part in ("embed_tokens", "shared_head.head")}
    directory = saved(tmp_path / "model", config, published, beside=False)
    found = read_head_tensors(directory)
    assert found is not None
    head = read_head(model, found.arrays)
    wanted = read_head(model, tensors)
    assert [array.dtype for array in arrays_of(head)] == [array.dtype for array in arrays_of(wanted)]
    assert all(mx.array_equal(*pair).item() for pair in zip(arrays_of(head), arrays_of(wanted), strict=True))
    dtypes = {array.dtype for array in arrays_of(head)}
    assert dtypes == ({mx.bfloat16, mx.float32} if name == "glm4_moe" else {mx.bfloat16})
    opened = open_mlx_engine(str(directory), EngineOptions(rows_max=1, warm_up_s=0))
    opened.engine.close()
    assert opened.facts["draft_head"] == "the model's own"


@pytest.mark.parametrize(
    ("name", "promise"), [("qwen3_5", "mtp_num_hidden_layers"), ("glm4_moe", "num_nextn_predict_layers")]
)
def test_a_promise_without_tensors_is_told(tmp_path, caplog, name, promise):
    """In the log of the worker, and for `models` and `doctor`."""
    config = {**ARCHITECTURES[name], promise: 1}
    directory = save_model(tmp_path / "model", config)
    with caplog.at_level(logging.WARNING, logger="zmqengine.engine"):
        assert read_head_tensors(directory) is None
    assert promise in str(caplog.records[-1].reason)  # type: ignore[attr-defined]
    missing = open_checkpoint(directory).missing_head
    assert promise in missing
    assert [each.line for each in look_at_model(str(directory), 0) if missing in each.line]
    assert missing in CliRunner().invoke(models, [str(tmp_path)]).output
    beginning = head_beginning(config)
    assert beginning is not None
    saved(directory, config, {beginning + within: array for within, array in head_tensors(config).items()})
    assert missing_head(directory, json.loads((directory / "config.json").read_text())) == ""
    assert open_checkpoint(directory).missing_head == ""
