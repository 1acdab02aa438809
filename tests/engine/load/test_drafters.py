"""Directories of drafters: read in the forms in which they are published, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from tests.engine.load.test_head_tensors import published
from tests.support.drafters import (
    ASSISTANT,
    ASSISTED,
    BLOCK,
    CLUSTERED,
    EAGLE,
    TAPS,
    TARGET,
    assistant_tensors,
    block_tensors,
    drafting_runner,
    eagle_tensors,
    save_drafter,
)
from tests.support.engines import runner_of
from tests.support.heads import head_module, tensors_of_head
from tests.support.models import MIXTURE, VOCAB_SIZE, build_model, save_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.checkpoint.drafters import read_drafter
from zmqengine.cli.commands.models import models
from zmqengine.doctor.model import look_at_model
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.head_tensors import read_drafter_tensors
from zmqengine.engine.models.families import read_drafter_weights
from zmqengine.engine.models.layers import Unsupported
from zmqengine.engine.models.tree import arrays_of, kind_of
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.errors import ModelLoadError
from zmqengine.serve.entries import read_offer


def tokens_of(directory: Path, **options: Any) -> tuple[list[int], Any]:
    """The first tokens after a prompt, and what was opened."""
    opened = open_mlx_engine(str(directory), EngineOptions(rows_max=1, warm_up_s=0, **options))
    assert opened.engine.insert([RowRequest(0, [1, 2, 3, 4], 12)]) == []
    tokens: list[int] = []
    while len(tokens) < 12:
        tokens += [token.token for token in opened.engine.next().tokens]
    opened.engine.close()
    return tokens, opened


def eagle_beside(tmp_path: Path, config: dict[str, Any] = TARGET) -> tuple[Path, Path]:
    """A model and an EAGLE-3 drafter on disk."""
    drafter = save_drafter(tmp_path / "drafter", EAGLE, eagle_tensors(EAGLE))
    return save_model(tmp_path / "model", config), drafter


def head_directory(directory: Path, *, is_raw: bool) -> tuple[Path, Path]:
    """A Qwen3.5 and its head in a directory of its own, as it was published or converted."""
    config = ARCHITECTURES["qwen3_5"]
    model = save_model(directory / "model", config)
    built = build_model(config)
    tensors = tensors_of_head(built, head_module(built))
    if is_raw:
        tensors = {f"mtp.{name}": array for name, array in published(tensors).items()}
    told = {"model_type": "qwen3_5_mtp", "text_config": config, "block_size": 3}
    return model, save_drafter(directory / "head", told, tensors)


@pytest.mark.parametrize(
    ("kind", "speculate"),
    [
        ("an EAGLE-3 drafter", "auto"),
        ("an EAGLE-3 drafter", "draft"),
        ("a DFlash drafter", "auto"),
        ("a Gemma 4 assistant", "auto"),
    ],
)
def test_a_model_drafts_by_a_drafters_directory(tmp_path: Path, kind: str, speculate: Any) -> None:
    """From the files to the tokens, on the kernels that this device takes by default."""
    model, drafter = eagle_beside(tmp_path)
    if kind == "a DFlash drafter":
        save_drafter(drafter, BLOCK, block_tensors(BLOCK))
    if kind == "a Gemma 4 assistant":
        model = save_model(tmp_path / "gemma", ASSISTED)
        save_drafter(drafter, CLUSTERED, assistant_tensors(CLUSTERED))
    tokens, opened = tokens_of(model, draft=str(drafter), speculate=speculate)
    source = opened.engine._speculator.model
    assert opened.facts["draft_head"] == kind
    assert source.times.of(1) > 0
    plain, without = tokens_of(model, speculate="off")
    assert tokens == plain
    assert opened.engine.memory().weights > without.engine.memory().weights


def test_a_source_without_drafters_leaves_the_directory_alone(tmp_path: Path) -> None:
    """`--speculate ngram` has no use for it."""
    model, drafter = eagle_beside(tmp_path)
    _, opened = tokens_of(model, draft=str(drafter), speculate="ngram")
    assert opened.engine._speculator.model is None
    assert opened.runner.head is None


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_head_in_a_directory_of_its_own_is_the_models(tmp_path: Path, *, is_raw: bool) -> None:
    """Its norms get their 1 where its tensors have the names of the model's files."""
    model, directory = head_directory(tmp_path, is_raw=is_raw)
    tokens, opened = tokens_of(model, draft=str(directory))
    assert opened.facts["draft_head"] == "a head in a directory of its own"
    built = build_model(ARCHITECTURES["qwen3_5"])
    wanted = tensors_of_head(built, head_module(built))
    got = opened.runner.head.weights
    assert mx.allclose(got.norm.weight, wanted["norm.weight"], atol=1e-6)
    assert mx.allclose(got.join.weight, wanted["fc.weight"])
    assert tokens == tokens_of(model, speculate="off")[0]


@pytest.mark.parametrize(
    ("ids", "taps"),
    [([2, 3, 5], (2, 3, 5)), ([1, 2, 4], (2, 3, 5)), ([1, 3, 5], (2, 4, 6)), ([2, 4, 6], (2, 4, 6))],
)
def test_both_ways_of_counting_layers_are_understood(ids: list[int], taps: tuple[int, ...]) -> None:
    """The first number tells them apart."""
    model = runner_of(build_model(TARGET), "mlx").decoder.weights
    for config in (
        {**EAGLE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        {**EAGLE, "eagle_config": None, "eagle_aux_hidden_state_layer_ids": ids},
    ):
        assert read_drafter_weights("eagle3", config, eagle_tensors(EAGLE), model).taps == taps


def test_other_forms_have_the_same_weights() -> None:
    """As the project speculators writes them; in bfloat16; and quantised ones are read."""
    model = runner_of(build_model(TARGET), "mlx").decoder.weights
    tensors = eagle_tensors(EAGLE)
    wanted = read_drafter_weights("eagle3", EAGLE, tensors, model)
    inner = {key: value for key, value in EAGLE.items() if key not in ("architectures", "eagle_config")}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "draft_vocab_size": EAGLE["draft_vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }
    named = {name.replace("midlayer.", "layers.0."): array for name, array in tensors.items()}
    other = read_drafter_weights("eagle3", config, named, model)
    assert all(mx.array_equal(*pair) for pair in zip(arrays_of(wanted), arrays_of(other), strict=True))
    assert kind_of(wanted) == kind_of(other)
    packed = dict(named)
    packed["fc.weight"], packed["fc.scales"], packed["fc.biases"] = mx.quantize(tensors["fc.weight"], 64, 4)
    join: Any = read_drafter_weights("eagle3", config, packed, model).join  # type: ignore[attr-defined]
    assert (join.bits, join.group_size, join.outputs) == (4, 64, 64)


@pytest.mark.parametrize(
    ("change", "tensors", "match"),
    [
        ({"norm_output": True}, {}, "norm_output"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}}, {}, "6 layers"),
        ({"eagle_config": None}, {}, r"\[2, 3, 3\]"),
        ({"intermediate_size": 64}, {}, "gate_proj"),
        ({}, {"layers.1.input_layernorm.weight": mx.ones(64)}, r"layers\.1"),
        ({}, {"fc.weight": mx.zeros((64, 96))}, "another model"),
        ({}, {"d2t": mx.full((100,), 300)}, str(VOCAB_SIZE)),
        ({}, {"d2t": mx.zeros((50,), mx.int64)}, "d2t"),
        ({"rope_scaling": {"rope_type": "spiral"}}, {}, "rotation"),
    ],
)
def test_a_drafter_that_would_be_computed_wrongly_is_refused_by_name(
    change: dict[str, Any], tensors: dict[str, mx.array], match: str
) -> None:
    """Also one that was made for a model of another shape."""
    model = runner_of(build_model(TARGET), "mlx").decoder.weights
    with pytest.raises(Unsupported, match=match):
        read_drafter_weights("eagle3", {**EAGLE, **change}, {**eagle_tensors(EAGLE), **tensors}, model)


@pytest.mark.parametrize(
    ("change", "tensors", "match"),
    [
        ({"block_size": None}, {}, "block_size"),
        ({"dflash_config": {"mask_token_id": 300}}, {}, "target_layer_ids"),
        ({"dflash_config": {**BLOCK["dflash_config"], "mask_token_id": 4000}}, {}, "4000"),
        ({"dflash_config": {**BLOCK["dflash_config"], "target_layer_ids": [1, 2, 6]}}, {}, "6 layers"),
        ({"dflash_config": {**BLOCK["dflash_config"], "causal": True}}, {}, "causal"),
        ({"dflash_config": {**BLOCK["dflash_config"], "conv_kernel_size": 4}}, {}, "conv_kernel_size"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "layer_types"),
        ({"num_target_layers": 36}, {}, "36 layers"),
        ({"head_dim": 16}, {}, "q_proj"),
        ({}, {"mask_embedding": mx.zeros(64)}, "mask_embedding"),
        ({}, {"fc.weight": mx.zeros((64, 96))}, "another model"),
    ],
)
def test_a_block_that_would_be_computed_wrongly_is_refused_by_name(
    change: dict[str, Any], tensors: dict[str, mx.array], match: str
) -> None:
    """Also one that was made for a model of another shape."""
    model = runner_of(build_model(TARGET), "mlx").decoder.weights
    with pytest.raises(Unsupported, match=match):
        read_drafter_weights("dflash", {**BLOCK, **change}, {**block_tensors(BLOCK), **tensors}, model)


@pytest.mark.parametrize(
    ("change", "within", "match"),
    [
        ({"backbone_hidden_size": 128}, {}, "128"),
        ({"text_config": None}, {}, "text_config"),
        ({}, {"enable_moe_block": True}, "enable_moe_block"),
        ({}, {"vocab_size": 100}, "100 words"),
        ({}, {"num_hidden_layers": 2}, r"layers\.2"),
        ({"num_centroids": 7}, {}, "centroids"),
        ({"centroid_intermediate_top_k": 17}, {}, "token_ordering"),
    ],
)
def test_an_assistant_that_would_be_computed_wrongly_is_refused_by_name(
    change: dict[str, Any], within: dict[str, Any], match: str
) -> None:
    """Also one that was made for a model of another shape."""
    model = runner_of(build_model(ASSISTED), "mlx").decoder.weights
    config = {**CLUSTERED, "text_config": {**CLUSTERED["text_config"], **within}, **change}
    with pytest.raises(Unsupported, match=match):
        read_drafter_weights("assistant", config, assistant_tensors(CLUSTERED), model)


def test_an_assistant_of_a_model_with_other_keys_is_refused() -> None:
    """Its layers would read what is not there."""
    text = {**ASSISTANT["text_config"], "num_key_value_heads": 1}
    with pytest.raises(Unsupported, match="another shape"):
        drafting_runner(
            build_model(ASSISTED), {**ASSISTANT, "text_config": text}, assistant_tensors(ASSISTANT)
        )


def test_a_drafter_without_a_head_of_its_width_is_refused() -> None:
    """It cannot take the model's embedding or vocabulary."""
    config = {**EAGLE, "hidden_size": 32, "target_hidden_size": 64}
    model = runner_of(build_model(TARGET), "mlx").decoder.weights
    with pytest.raises(Unsupported, match="embed_tokens"):
        read_drafter_weights("eagle3", config, eagle_tensors(config), model)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, "EAGLE drafter"),
        ({"model_type": "qwen3_dspark"}, "DSpark"),
        ({"model_type": "glm4_moe_lite_mtp"}, "glm4_moe_lite_mtp"),
        ({"model_type": "medusa"}, "Medusa"),
    ],
)
def test_other_drafters_are_refused_by_name(tmp_path: Path, config: dict[str, Any], match: str) -> None:
    """As a drafter, and as a model."""
    model, drafter = eagle_beside(tmp_path)
    save_drafter(drafter, config, {"fc.weight": mx.zeros((1, 1))})
    with pytest.raises(ModelLoadError, match=match):
        open_mlx_engine(str(model), EngineOptions(rows_max=1, warm_up_s=0, draft=str(drafter)))
    with pytest.raises(ModelLoadError, match=match):
        open_mlx_engine(str(drafter), EngineOptions(rows_max=1, warm_up_s=0))


def test_a_model_that_shows_nothing_of_itself_refuses_a_drafter(tmp_path: Path) -> None:
    """Where mlx-lm's code runs it; and one whose tensors are of another format says so."""
    model, drafter = eagle_beside(tmp_path, MIXTURE)
    with pytest.raises(ModelLoadError, match=r"EAGLE-3 drafter cannot draft.*mlx-lm's"):
        open_mlx_engine(str(model), EngineOptions(rows_max=1, warm_up_s=0, draft=str(drafter)))
    found = read_drafter(drafter)
    assert found is not None
    (drafter / "model.safetensors").rename(drafter / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        read_drafter_tensors(drafter, found)


def test_a_directory_of_a_drafter_is_told_from_a_model(tmp_path: Path) -> None:
    """By `models` and `doctor`; a launcher counts its bytes for the model that it drafts for."""
    model, drafter = eagle_beside(tmp_path)
    assert read_drafter(model) is None
    lines = CliRunner().invoke(models, [str(drafter)]).output
    assert "EAGLE-3 drafter" in lines
    (finding,) = look_at_model(str(drafter), 0)
    assert "EAGLE-3 drafter" in finding.line
    assert "--draft" in finding.line


def test_a_launcher_counts_the_bytes_of_a_drafter(tmp_path: Path) -> None:
    """Beside those of the model that it drafts for; one that is not read is said to be."""
    _, drafter = eagle_beside(tmp_path)
    need = read_offer(["pico"], tmp_path, {}).find("pico").need_bytes
    drafted = read_offer(["pico"], tmp_path, {"draft": str(drafter)}).find("pico")
    assert drafted.need_bytes >= need + (drafter / "model.safetensors").stat().st_size
    save_drafter(drafter, {"model_type": "medusa"}, {})
    never = read_offer(["pico"], tmp_path, {"draft": str(drafter)}).find("pico").never
    assert "Medusa" in never


@pytest.mark.slow
def test_prompts_on_disk_are_those_of_one_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one keeps other keys and values for the same tokens."""
    model, _ = eagle_beside(tmp_path)
    names: list[str] = []
    monkeypatch.setattr(MlxEngine, "keep_on_disk", lambda engine, name, *_: names.append(name))
    for seed in (0, 0, 1):
        drafter = save_drafter(tmp_path / "drafter", EAGLE, eagle_tensors(EAGLE, seed))
        tokens_of(model, draft=str(drafter), cache_dir=str(tmp_path / "cache"))
    assert names[0] == names[1] != names[2]
