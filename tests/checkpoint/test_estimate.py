"""What is told of a model before it is loaded, against the model loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from zmqengine.checkpoint.cache_shape import GROWTH_TOKENS, shape_of
from zmqengine.checkpoint.estimate import ACTIVATION_SHARE, open_checkpoint
from zmqengine.checkpoint.on_disk import find_model, find_models
from zmqengine.checkpoint.weights import CheckpointError, read_weights
from zmqengine.pico import BUNDLED, model_path


def write_tensors(file: Path, tensors: dict[str, tuple[str, int]], *, cut: int = 0) -> None:
    """A safetensors file of zeros: name to type and bytes."""
    header, place = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [place, place + size]}
        place += size
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    file.write_bytes((len(text).to_bytes(8, "little") + text + bytes(place))[: None if not cut else -cut])


def llama(**fields: Any) -> dict[str, Any]:
    """A config.json of four layers with 2 heads of 8 numbers."""
    return {
        "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 32, "max_position_embeddings": 4096, **fields,
    }  # fmt: skip


def test_weights_are_counted_from_headers_over_all_shards(tmp_path: Path) -> None:
    """A quantised model computes in the type of its scales."""
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("U32", 4000), "b": ("BF16", 100)})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"c": ("BF16", 60), "d": ("F32", 40)})
    weights = read_weights(tmp_path)
    assert (weights.total_bytes, weights.tensors, weights.float_bytes) == (4200, 4, 2)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"[]", b"PK\x03\x04zip!"]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Not a traceback, and not a size."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_weights(tmp_path)


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    """As an interrupted copy leaves it."""
    write_tensors(tmp_path / "model.safetensors", {"a": ("F32", 400)}, cut=1)
    with pytest.raises(CheckpointError, match="cut off"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"model_max_length": "x"}'),
        ("modules.json", "[null]"),
        ("config.json", '{"model_type": "llama", "architectures": 5}'),
        ("config.json", '{"model_type": "llava", "text_config": [1]}'),
        ("config.json", '{"model_type": "llama", "architectures": [{}]}'),
    ],
)
def test_a_file_of_another_form_is_the_models_own_mistake(tmp_path: Path, name: str, text: str) -> None:
    """It hides no other model of this machine: the list shows the reason."""
    shutil.copytree(model_path(), tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(CheckpointError, match="not of a model's form"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "kind", "numbers"),
    [
        ({}, "full", 4 * 32 * (1000 + GROWTH_TOKENS)),
        ({"head_dim": 16}, "full", 4 * 64 * (1000 + GROWTH_TOKENS)),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 100},
            "full+sliding", 2 * 32 * (1000 + GROWTH_TOKENS) + 2 * 32 * 100,
        ),
        (
            {"sliding_window_pattern": 4, "sliding_window": 100},
            "full+sliding", 32 * (1000 + GROWTH_TOKENS) + 3 * 32 * 100,
        ),
        ({"full_attention_interval": 2}, "full+state", 2 * 32 * (1000 + GROWTH_TOKENS)),
        ({"kv_lora_rank": 20, "qk_rope_head_dim": 4}, "latent", 4 * 24 * (1000 + GROWTH_TOKENS)),
        ({"model_type": "mamba"}, "state", 0),
    ],
)  # fmt: skip
def test_the_bytes_of_a_chat_follow_from_the_kinds_of_layers(
    fields: dict[str, Any], kind: str, numbers: int
) -> None:
    """Layer by layer, for mlx-lm's own caches: all tokens, the last few, a state, or a latent."""
    shape = shape_of(llama(**{"model_type": "phi3", **fields}))
    assert shape.kind == kind
    assert shape.bytes_for(1000, 2) == 2 * numbers


@pytest.mark.parametrize(
    ("tokens", "slot"), [(1, 512), (505, 1024), (1000, 1024), (2048, 4608), (4096, 4608), (5000, 8192)]
)
def test_a_chat_of_our_decoder_takes_a_slot(tokens: int, slot: int) -> None:
    """Slots have few sizes, for layers with windows too: a power of two, or the context of 4,096 and a verify block."""
    fields = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 100}
    for model_type, outer in (("gemma3_text", {}), ("qwen3", {"model_type": "vlm"})):
        config = llama(**fields, model_type=model_type)
        shape = shape_of({**outer, "text_config": config} if outer else config)
        assert shape.bytes_for(tokens, 2) == 2 * 4 * 32 * slot


def test_types_that_take_slots_are_those_of_our_decoder() -> None:
    """The estimate imports no MLX, so the types are written down twice."""
    pytest.importorskip("mlx.core")
    from zmqengine.checkpoint.cache_shape import _SLOT_TYPES
    from zmqengine.engine.models import families

    modules = {name for family in families._FAMILIES for name in family.MODULES}
    assert modules <= _SLOT_TYPES
    # Types that mlx-lm reads by such a module, or around one.
    assert _SLOT_TYPES - modules == {"mistral", "gemma3", "gemma4", "qwen3_5_text", "qwen3_5_moe", "kimi_k2"}


def test_a_model_that_also_sees_has_its_text_part_read() -> None:
    """Its own numbers stand one level down."""
    shape = shape_of(
        {"model_type": "vlm", "text_config": llama(), "vision_config": {"num_hidden_layers": 99}}
    )
    assert (shape.full_layers, shape.context_tokens) == (4, 4096)


def test_what_a_model_can_do_is_read_from_its_files(tmp_path: Path) -> None:
    """A chat template of its own file counts as one among the tokenizer's."""
    found = {name: open_checkpoint(model_path(name)).capabilities for name in BUNDLED}
    assert found == {
        "pico": ("completion",),
        "pico-tools": ("completion", "tools"),
        "pico-embed": ("embedding",),
        "pico-eye": ("completion", "vision"),
    }
    shutil.copytree(model_path(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert open_checkpoint(tmp_path / "model").capabilities == ("completion", "tools")


def test_chats_are_what_the_limit_leaves(tmp_path: Path) -> None:
    """Limit less activations less weights, over the bytes of a chat."""
    write_tensors(tmp_path / "model.safetensors", {"a": ("BF16", 10_000)})
    (tmp_path / "config.json").write_text(json.dumps(llama(quantization={"bits": 4, "group_size": 64})))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantisation == "4-bit"
    each = 2 * 4 * 32 * 1024
    limit = int((10_000 + 3.5 * each) / (1 - ACTIVATION_SHARE))
    assert checkpoint.chats(limit, 1000) == 3
    assert checkpoint.chats(5_000, 1000) == 0
    assert checkpoint.kv_budget(5_000) < 0
    assert checkpoint.lengths() == [2048, 4096]


@pytest.mark.parametrize("name", ["pico", "LLAMA", "SLIDING", "MIXTURE"])
def test_the_estimate_is_what_the_loaded_model_takes(name: str, tmp_path: Path) -> None:
    """Weights to a percent; the bytes of a chat as the engine projects them from real caches."""
    pytest.importorskip("mlx.core")
    from tests.support import models
    from zmqengine.engine.open import open_mlx_engine
    from zmqengine.engine.options import EngineOptions

    directory = model_path() if name == "pico" else models.save_model(tmp_path / "m", getattr(models, name))
    checkpoint = open_checkpoint(directory)
    engine = open_mlx_engine(str(directory), EngineOptions(warm_up_s=0, speculate="off")).engine
    assert checkpoint.weights.total_bytes == pytest.approx(engine.info.parameter_bytes, rel=0.01)
    assert checkpoint.shape.context_tokens == engine.info.context_tokens
    try:
        for tokens in (10, 500, 600, 2000, engine.info.context_tokens):
            estimated = checkpoint.shape.bytes_for(tokens, checkpoint.weights.float_bytes)
            assert estimated == pytest.approx(engine.project_bytes(tokens), rel=0.01)
    finally:
        engine.close()


def test_the_need_of_an_encoder_is_what_its_worker_holds() -> None:
    """Weights and the largest batch, to a percent; a chat that it never has is no part of it."""
    pytest.importorskip("mlx.core")
    from zmqengine.checkpoint.recipe import read_recipe
    from zmqengine.engine.embedding.backend import CPU
    from zmqengine.engine.embedding.encoder_model import TextEncoder, load_encoder
    from zmqengine.engine.open import find_encoder_backend

    directory = model_path("pico-embed")
    recipe = read_recipe(directory)
    checkpoint = open_checkpoint(directory)
    for backend in {CPU.name: CPU, find_encoder_backend().name: find_encoder_backend()}.values():
        encoder, context_tokens, parameter_bytes = load_encoder(directory, recipe, backend)
        model, gpu = TextEncoder(encoder, recipe, [], context_tokens, backend), backend.is_gpu
        held = parameter_bytes + model.workspace_bytes
        assert checkpoint.need_bytes(on_gpu=gpu) == pytest.approx(held, rel=0.01)
    assert checkpoint.need_bytes(on_gpu=True) > checkpoint.need_bytes(on_gpu=False)


def test_models_are_found_in_the_hubs_cache_and_in_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hub id at the snapshot that main names; half-fetched ones and other repositories are passed over."""
    cache, mine = tmp_path / "hub", tmp_path / "mine"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    repository = cache / "models--owner--a--b"
    for snapshot in ("1", "2"):
        (repository / "snapshots" / snapshot).mkdir(parents=True)
        (repository / "snapshots" / snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    (cache / "models--owner--half" / "snapshots" / "1").mkdir(parents=True)
    (cache / "datasets--owner--c" / "snapshots" / "1").mkdir(parents=True)
    (mine / "local").mkdir(parents=True)
    (mine / "local" / "config.json").write_text("{}")
    found = list(find_models([mine]))
    assert [(model.name, model.directory.name) for model in found] == [
        ("owner/a--b", "1"),
        (str(mine / "local"), "local"),
    ]
    assert find_model("owner/a--b") == repository / "snapshots" / "1"
    assert find_model("owner/other") is None
    assert find_model(str(mine)) == mine
