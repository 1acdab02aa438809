"""Vectors equal those of transformers and torch, alone and among others, on a small checkpoint of each family."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.embedding import make_vectors
from tests.embedding.checkpoints import NAMES, case, engine_of, run, write
from zmqengine.engine.embedding.backend import Backend
from zmqengine.engine.interface import Engine, RowRequest, TextsRequest

COSINE_MIN = 1 - 1e-6
SCORE_NEAR = 1e-5
ORACLE = os.environ.get("ZMQENGINE_TRANSFORMERS", sys.executable)
"""A Python with transformers and torch, if this one has none."""
has_oracle = sys.executable != ORACLE or importlib.util.find_spec("torch") is not None


def check(directory: Path, given: dict[str, Any], backend: Backend | None = None) -> None:
    """All texts in one row, and each in a row of its own."""
    engine = engine_of(write(directory, given), backend)
    texts, second, expected = given["texts"], given["second"], np.array(given["vectors"], np.float32)
    output: Any = "score" if given["pooling"] is None else "embedding"
    together, failures = run(engine, [TextsRequest(0, texts, second, output)])
    assert failures == []
    alone, _ = run(
        engine,
        [TextsRequest(1 + index, [text], [second[index]], output) for index, text in enumerate(texts[:6])],
    )
    near(together[0], expected, output)
    near(np.concatenate([alone[row] for row in sorted(alone)]), expected[:6], output)
    engine.close()


def near(vectors: np.ndarray, expected: np.ndarray, output: str) -> None:
    """Embeddings by their angle, scores by their difference."""
    assert vectors.shape == expected.shape
    if output == "score":
        np.testing.assert_allclose(vectors, expected, atol=SCORE_NEAR, rtol=1e-4)
    else:
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert (vectors * expected).sum(axis=1).min() >= COSINE_MIN


def test_the_cases_are_those_of_the_script() -> None:
    """None is left out."""
    assert set(NAMES) == set(make_vectors.CASES)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Attention, positions, windows, pooling and heads: a mistake in any of them turns a vector."""
    check(tmp_path, case(name))


@pytest.mark.skipif(not has_oracle, reason="no transformers and torch; ZMQENGINE_TRANSFORMERS names a Python")
def test_vectors_of_another_seed_are_those_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of arrays and texts that nobody has looked at."""
    asked = subprocess.run(
        [ORACLE, make_vectors.__file__, "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for name, given in json.loads(asked.stdout.splitlines()[-1]).items():
        check(tmp_path_factory.mktemp(name), given)


def jina(act: str, heads: int) -> dict[str, Any]:
    """A small checkpoint of Jina's second models, by the names of its publication, and its vectors.

    From its paper (Guenther et al., 2023): BERT whose scores fall with the distance of two tokens, with gated networks.
    """
    width, inner, layers = 8 * heads, 48, 3
    config = {
        **make_vectors.SMALL, "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], "hidden_size": width,
        "num_attention_heads": heads, "position_embedding_type": "alibi", "feed_forward_type": act,
        "max_position_embeddings": 8192, "layer_norm_eps": 1e-12, "type_vocab_size": 2,
    }  # fmt: skip
    shapes = {
        "embeddings.word_embeddings.weight": [90, width],
        "embeddings.token_type_embeddings.weight": [2, width],
    }
    norms = ["embeddings.LayerNorm"]
    for index in range(layers):
        layer = f"encoder.layer.{index}."
        products = [f"attention.self.{part}" for part in ("query", "key", "value")] + [
            "attention.output.dense"
        ]
        shapes |= {f"{layer}{product}.weight": [width, width] for product in products}
        shapes |= {f"{layer}{product}.bias": [width] for product in products}
        shapes |= {
            f"{layer}mlp.gated_layers.weight": [2 * inner, width],
            f"{layer}mlp.wo.weight": [width, inner],
        }
        shapes |= {f"{layer}mlp.wo.bias": [width]}
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}mlp.layernorm"]
    shapes |= {f"{norm}.{part}": [width] for norm in norms for part in ("weight", "bias")}
    arrays = {name: make_vectors.array_of(name, shape, 3).astype(float) for name, shape in shapes.items()}

    def product(states: np.ndarray, name: str) -> np.ndarray:
        return states @ arrays[f"{name}.weight"].T + arrays.get(f"{name}.bias", 0)

    def norm(states: np.ndarray, name: str) -> np.ndarray:
        states = states - states.mean(1, keepdims=True)
        return states / states.std(1, keepdims=True) * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    # By the geometric sequences of Press et al. (2022), those of twice the heads in between.
    slopes = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 3: [1 / 16, 1 / 256, 1 / 4]}[heads]
    vectors = []
    texts, second = make_vectors.texts_of(3)
    for text in texts:
        types = arrays["embeddings.token_type_embeddings.weight"][0]
        states = norm(arrays["embeddings.word_embeddings.weight"][text] + types, "embeddings.LayerNorm")
        distances = np.abs(np.arange(len(text))[:, None] - np.arange(len(text)))
        for index in range(layers):
            layer = f"encoder.layer.{index}."
            queries, keys, values = (
                product(states, f"{layer}attention.self.{part}").reshape(len(text), heads, 8).swapaxes(0, 1)
                for part in ("query", "key", "value")
            )
            scores = (
                queries @ keys.swapaxes(1, 2) / math.sqrt(8) - np.array(slopes)[:, None, None] * distances
            )
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            attended = (weights @ values).swapaxes(0, 1).reshape(len(text), width)
            states = norm(
                states + product(attended, f"{layer}attention.output.dense"),
                f"{layer}attention.output.LayerNorm",
            )
            gate, up = np.split(product(states, f"{layer}mlp.gated_layers"), 2, axis=1)
            active = (
                gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) / 2
                if act == "geglu"
                else gate.clip(0)
            )
            states = norm(states + product(active * up, f"{layer}mlp.wo"), f"{layer}mlp.layernorm")
        vectors.append(states.mean(0) / np.linalg.norm(states.mean(0)))
    return {"seed": 3, "config": config, "pooling": "mean", "shapes": shapes, "texts": texts,
            "second": [0] * len(second), "vectors": vectors}  # fmt: skip


@pytest.mark.parametrize(("act", "heads"), [("geglu", 4), ("reglu", 3)])
def test_vectors_of_jinas_second_models_are_those_of_the_paper(act: str, heads: int, tmp_path: Path) -> None:
    """transformers has none of them; the other side is numpy in float64. Three heads are no power of two."""
    check(tmp_path, jina(act, heads))


def test_texts_of_a_pair_are_told_apart(tmp_path: Path) -> None:
    """A reranker of BERT's kind scores a pair otherwise than the same tokens as one text."""
    given = case("bert-score")
    engine = engine_of(write(tmp_path, given))
    text = given["texts"][3]
    scores, _ = run(engine, [TextsRequest(0, [text, text], [0, 21], "score")])
    assert abs(scores[0][0, 0] - scores[0][1, 0]) > 1e-4


def engine_and_texts(tmp_path: Path, name: str) -> tuple[Engine, list[list[int]]]:
    given = case(name)
    return engine_of(write(tmp_path, given)), given["texts"]


@pytest.mark.parametrize("name", ["bert-mean", "qwen3-last"])
def test_dimensions_are_the_first_floats_made_of_length_one(name: str, tmp_path: Path) -> None:
    """As Matryoshka embeddings are used; every row may ask for others."""
    engine, texts = engine_and_texts(tmp_path, name)
    made, _ = run(engine, [TextsRequest(0, texts), TextsRequest(1, texts, dimensions=5)])
    cut = made[0][:, :5]
    np.testing.assert_allclose(made[1], cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)


DECODERS = ["llama-mean", "qwen3-last", "lfm2-mean"]


def vectors_of(engine: Engine, texts: list[list[int]], *, tokens_max: int = 512) -> tuple[np.ndarray, int]:
    """The vectors of texts of one row in chunks of at most `tokens_max`, and the tokens computed for them."""
    engine._pace.tokens_max = engine._pace._idle_tokens_max = tokens_max  # type: ignore[attr-defined]
    before = engine._prompt_tokens  # type: ignore[attr-defined]
    made, failures = run(engine, [TextsRequest(0, texts)])
    assert failures == []
    return made[0], engine._prompt_tokens - before  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DECODERS)
def test_a_text_of_a_decoder_in_slices_gives_the_same_vector(name: str, tmp_path: Path) -> None:
    """Caches carry attention and recurrent states from slice to slice, beside slices of other texts and a stream."""
    engine, texts = engine_and_texts(tmp_path, name)
    whole, computed = vectors_of(engine, texts)
    assert computed == sum(map(len, texts))
    sliced, computed = vectors_of(engine, texts, tokens_max=7)
    assert computed == sum(map(len, texts))
    np.testing.assert_allclose(sliced, whole, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-last", "lfm2-mean"])
def test_texts_beside_a_stream_change_neither(name: str, tmp_path: Path) -> None:
    """They are pieces of its steps; texts that are left out of a step, slices and abandoned ones included."""
    engine, texts = engine_and_texts(tmp_path, name)
    stream = RowRequest(row=9, prompt=[5, 6, 7], max_tokens=100)
    assert engine.insert([stream]) == []
    alone = tokens_of(engine)
    expected, _ = vectors_of(engine, texts)
    engine._pace.target_s, engine._pace.tokens_max = 0.0, 48  # type: ignore[attr-defined]
    assert engine.insert([stream]) == []
    assert engine.embed([TextsRequest(0, texts * 4), TextsRequest(1, [texts[0] * 3] * 9)]) == []
    made: list[np.ndarray] = []
    tokens = tokens_of(engine, made)
    assert tokens == alone
    assert len(made) > 4
    assert engine.park(1) == 0
    for _ in range(100):
        made += [one for of_row in engine.next().vectors for one in of_row.vectors]
    np.testing.assert_allclose(made, np.tile(expected, (4, 1)), atol=1e-5)
    assert engine.stats().rows_prefilling == 0
    assert engine.memory().kv == 0


def test_a_prompt_and_texts_share_chunks(tmp_path: Path) -> None:
    """A flood of texts leaves three quarters to a prompt, and goes on in the last one."""
    engine, texts = engine_and_texts(tmp_path, "llama-mean")
    engine._pace.target_s, engine._pace.tokens_max = 0.0, 40  # type: ignore[attr-defined]
    engine._pace._idle_tokens_max = 40  # type: ignore[attr-defined]
    assert engine.embed([TextsRequest(0, texts * 30)]) == []
    assert engine.insert([RowRequest(row=9, prompt=[5, 6, 7] * 30, max_tokens=2)]) == []
    read = []
    while not (result := engine.next()).tokens:
        read += [prefill.done for prefill in result.prefills if prefill.row == 9]
        assert len(read) < 9
    # Texts take whole ones up to their quarter.
    assert len(read) >= 2
    assert all(later - before >= 30 for before, later in zip([0, *read], read, strict=False))
    assert any(vectors.row == 0 for _ in range(8) for vectors in engine.next().vectors)


def tokens_of(engine: Engine, vectors: list[np.ndarray] | None = None) -> list[int]:
    """The tokens of the only row, up to its end, and the vectors of row 0 that came beside them."""
    tokens: list[int] = []
    while True:
        result = engine.next()
        tokens += [token.token for token in result.tokens]
        if vectors is not None:
            vectors += [one for of_row in result.vectors if of_row.row == 0 for one in of_row.vectors]
        if any(token.finish for token in result.tokens):
            return tokens


def test_a_beginning_that_texts_share_is_computed_twice_at_most(tmp_path: Path) -> None:
    """Once to see it, once to keep it: later texts start from the prefix cache. Nothing else of texts is kept."""
    engine, texts = engine_and_texts(tmp_path, "qwen3-last")
    prompt = list(range(20, 40))
    expected = np.concatenate([vectors_of(engine, [prompt + text])[0] for text in texts])
    cached = engine.stats().cached_tokens
    assert cached == 20 * (len(texts) - 2)
    assert engine.stats().prompt_cache["blocks"] == 1
    again, computed = vectors_of(engine, [prompt + text for text in texts])
    assert computed == sum(map(len, texts))
    np.testing.assert_allclose(again, expected, atol=1e-5)


def test_a_long_text_is_attended_to_in_parts_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of all its tokens at once would take memory with the square of its length."""
    from zmqengine.engine.embedding import packing

    for name in ("modernbert-mean", "bert-mean"):
        engine, texts = engine_and_texts(
            tmp_path / name if (tmp_path / name).mkdir() is None else tmp_path, name
        )
        whole, _ = run(engine, [TextsRequest(0, texts)])
        monkeypatch.setattr(packing, "SCORES_BYTES_MAX", 4096)
        parts, _ = run(engine, [TextsRequest(0, texts)])
        monkeypatch.undo()
        np.testing.assert_allclose(parts[0], whole[0], atol=1e-6)
