"""Language models that mlx-lm lacks, by mlx-vlm: loaded, batched and cached as others are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support.engines import finish, make_engine
from tests.support.models import CHAT_TEMPLATE, EOS, VOCAB_SIZE, build_tokenizer
from zmqengine.checkpoint import supported
from zmqengine.checkpoint.estimate import open_checkpoint
from zmqengine.checkpoint.supported import why_not_supported
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.loader import load
from zmqengine.engine.models.mlx_lm import KVCache, RotatingKVCache
from zmqengine.engine.models.mlx_vlm import VlmText
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions

COUNT = 8
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "k2_horizon": {"num_hidden_layers": 2, "intermediate_size": 128, "tie_word_embeddings": True},
    # A window of 8 in three of four layers, and experts.
    "cohere2_moe": {
        "num_hidden_layers": 4, "intermediate_size": 64, "sliding_window": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_num_shared_experts": 1,
    },
}  # fmt: skip
pytestmark = pytest.mark.process


def save(directory: Path, kind: str) -> Path:
    """A small random checkpoint of a family, with a tokenizer."""
    pytest.importorskip("mlx_vlm")
    config = {"model_type": kind, **SIZES, **CONFIGS[kind]}
    family = importlib.import_module(f"mlx_vlm.models.{kind}")
    mx.random.seed(0)
    model = family.Model(family.ModelConfig.from_dict(config))
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


def told_by_mlx_vlm(directory: Path, prompt: list[int]) -> list[int]:
    """The most probable continuation by mlx-vlm's own loading, calls and caches."""
    from mlx_vlm.models.cache import make_prompt_cache
    from mlx_vlm.utils import load_model

    model = load_model(directory).language_model
    cache, tokens, ids = make_prompt_cache(model), list(prompt), []
    for _ in range(COUNT):
        logits = model(mx.array([tokens], mx.uint32), cache=cache).logits
        ids.append(int(np.array(mx.argmax(logits[0, -1]))))
        tokens = ids[-1:]
    return ids


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_are_those_of_mlx_vlm(tmp_path: Path, kind: str) -> None:
    """Together, of unlike lengths, and again from the prefix cache."""
    directory = save(tmp_path / kind, kind)
    engine = make_engine(load(str(directory)).model, prefill_chunk=16)
    assert engine.info.batchable
    prompts = [list(range(3, 3 + length)) for length in (40, 5, 23)]
    expected = [told_by_mlx_vlm(directory, prompt) for prompt in prompts]
    for base in (0, 3):
        rows = [RowRequest(base + place, prompt, COUNT) for place, prompt in enumerate(prompts)]
        assert engine.insert(rows) == []
        run = finish(engine)
        assert [run.ids(row.row) for row in rows] == expected
    assert run.cached(3) == len(prompts[0]) - 1


def test_plain_caches_become_those_of_mlx_lm(tmp_path: Path) -> None:
    """Batches and blocks know them, and windows are cut as they are there."""
    model = load(str(save(tmp_path / "model", "cohere2_moe"))).model
    assert isinstance(model, VlmText)
    kinds = [type(cache) for cache in model.make_cache()]
    assert kinds == [RotatingKVCache, RotatingKVCache, RotatingKVCache, KVCache]
    assert model.make_cache()[0].max_size == 8


def test_a_model_that_computes_otherwise_with_them_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its logits."""
    directory = save(tmp_path / "model", "k2_horizon")
    from mlx_vlm.models import cache as theirs
    from mlx_vlm.models.k2_horizon import language

    call = language.LanguageModel.__call__

    def other(self: Any, inputs: Any, cache: Any = None, **options: Any) -> Any:
        made = call(self, inputs, cache=cache, **options)
        made.logits = made.logits * (1 if cache is None or isinstance(cache[0], theirs.KVCache) else -1)
        return made

    monkeypatch.setattr(language.LanguageModel, "__call__", other)
    model = load(str(directory)).model
    assert type(model.make_cache()[0]) is theirs.KVCache


def test_a_worker_says_whose_code_runs_the_model(tmp_path: Path) -> None:
    """And what it takes is known before."""
    directory = save(tmp_path / "model", "k2_horizon")
    opened = open_mlx_engine(str(directory), EngineOptions(warm_up_s=0))
    assert opened.facts["model_code"].startswith("mlx-vlm's")
    opened.engine.close()
    assert open_checkpoint(directory).model_type == "k2_horizon"


@pytest.mark.parametrize("installed", [True, False])
def test_a_model_that_needs_mlx_vlm_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Where it is not installed; where it is, a type that it cannot run as a language model is told so."""
    kind = "yolo11" if installed else "glm5_next"
    if installed:
        pytest.importorskip("mlx_vlm")
    else:
        monkeypatch.setattr(supported, "_mlx_vlm_root", lambda: None)
    config = {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reason = why_not_supported(tmp_path, config)
    assert ("no language model of that type" if installed else "zmqengine[mlx-vlm]") in reason
    with pytest.raises(CheckpointError, match=kind):
        open_checkpoint(tmp_path)
