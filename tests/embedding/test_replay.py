"""The forward pass of a GPU, on the CPU: padded shapes, replayed in one call, and vectors that are read a step late."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.embedding import test_equality
from tests.embedding.checkpoints import NAMES, case, run, write
from tests.embedding.checkpoints import engine_of as engine_on
from tests.embedding.test_engine import INFO, Clock, CountedModel
from tests.support.calls import calls_of
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.engine.embedding import padded
from zmqengine.engine.embedding.backend import CUDA, METAL, ReplayBounds
from zmqengine.engine.embedding.engine import EmbeddingEngine
from zmqengine.engine.embedding.padded import Padded
from zmqengine.engine.embedding.replay import Replays, rounded
from zmqengine.engine.interface import TextsRequest, VectorEngine

THEIR_OPERATIONS = 343
"""MLX operations of mlx-embeddings 0.1.0 for one text, by a BERT of six layers in float32; a norm counts as one."""
THEIR_CALLS = 467
"""Python calls of mlx-embeddings that build them."""


def engine_of(directory: Path) -> VectorEngine:
    """The engine of an encoder with the choices that are made on CUDA; MLX computes on its default device."""
    return engine_on(directory, CUDA)


@pytest.fixture
def replays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is not replayed fails."""
    monkeypatch.setattr(Replays, "begin", checked(Replays.begin))


def checked(begin: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: begin(*given) or pytest.fail("this batch was not replayed")


def encoders() -> list[str]:
    """The cases that have an encoder of our own."""
    return [name for name in NAMES if case(name)["config"]["model_type"] not in ("llama", "qwen3", "lfm2")]


def replays_of(engine: VectorEngine) -> Replays:
    found = engine._model._replays  # type: ignore[attr-defined]
    assert isinstance(found, Replays)
    return found


@pytest.mark.usefixtures("replays_only")
@pytest.mark.parametrize("name", encoders())
def test_vectors_of_padded_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """All of a case in one shape, and each text in its own: padding and neighbours change nothing."""
    given = case(name)
    assert read_recipe(write(tmp_path, given)).family
    (tmp_path / "again").mkdir()
    test_equality.check(tmp_path / "again", given, CUDA)


@pytest.mark.usefixtures("replays_only")
@pytest.mark.parametrize(("act", "heads"), [("geglu", 4), ("reglu", 3)])
def test_vectors_of_jinas_padded_texts_are_those_of_the_paper(act: str, heads: int, tmp_path: Path) -> None:
    """Scores that fall with the distance are terms of the same masks."""
    test_equality.check(tmp_path, test_equality.jina(act, heads), CUDA)


@pytest.mark.usefixtures("replays_only")
def test_a_request_of_texts_of_all_lengths_is_one_batch(tmp_path: Path) -> None:
    """The pace counts their tokens: replays do not pad short texts to the longest."""
    engine = engine_of(write(tmp_path, case("bert-mean")))
    engine.embed([TextsRequest(0, [[5] * 40, *[[6] * 5] * 40])])
    assert not engine.next().vectors
    assert [vectors.is_whole for vectors in engine.next().vectors] == [True]


@pytest.mark.parametrize("name", encoders())
def test_padded_texts_have_the_vectors_of_texts_without_padding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths up to the model's context, where padding would have no positions."""
    given = case(name)
    output: Any = "score" if given["pooling"] is None else "embedding"
    (tmp_path / "a").mkdir()
    padded = engine_of(write(tmp_path / "a", given))
    longest = padded.info.context_tokens
    lengths = [*range(1, 40), longest - 17, longest - 1, longest]
    texts = [
        [2 + (index * 7 + place * 5) % 80 for place in range(length)] for index, length in enumerate(lengths)
    ]
    made, _ = run(padded, [TextsRequest(0, texts, output=output)])
    (tmp_path / "b").mkdir()
    plain = engine_of(write(tmp_path / "b", given))
    monkeypatch.setattr(Replays, "begin", lambda *_: None)
    expected, _ = run(plain, [TextsRequest(0, texts, output=output)])
    test_equality.near(made[0], expected[0], output)


@pytest.mark.parametrize("pooling", ["first", "last", "mean", "most"])
def test_padding_is_in_no_pool(pooling: str) -> None:
    """Whatever its states are."""
    states = mx.random.normal((3, 16, 4), key=mx.random.key(1))
    lengths = [16, 1, 9]
    batch = Padded(mx.zeros((3, 16), mx.int32), mx.array(lengths)[:, None])
    of = {
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
        "mean": lambda x: x.mean(0),
        "most": lambda x: x.max(0),
    }
    expected = [of[pooling](np.array(states[row, :length])) for row, length in enumerate(lengths)]
    for padding in (0.0, 1e9, -1e9):
        inside = mx.arange(16)[None, :, None] < mx.array(lengths)[:, None, None]
        given = mx.where(inside, states, padding).reshape(48, 4)
        np.testing.assert_allclose(getattr(batch, pooling)(given), expected, atol=1e-6)


@pytest.mark.usefixtures("replays_only")
def test_a_token_that_is_not_finite_ends_its_text_alone(tmp_path: Path) -> None:
    """Its neighbours in the rectangle are as long with padding, which is none of its tokens."""
    opened = engine_of(write(tmp_path, case("bert-mean")))
    opened._model._encoder.word.weight[0] = float("nan")  # type: ignore[attr-defined]
    made, failures = run(
        opened, [TextsRequest(0, [[7, 0, 7]]), TextsRequest(1, [[8, 9]]), TextsRequest(2, [[5]])]
    )
    assert [failure.row for failure in failures] == [0]
    assert np.isfinite([made[1], made[2]]).all()


@pytest.mark.parametrize("mistake", ["mask", "error", "rounding", "none"])
def test_replays_that_are_wrong_on_this_device_are_not_used(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are compared when the model is opened; the vectors are right in any case."""

    def wrong(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array
    ) -> mx.array:
        if mistake == "error":
            raise RuntimeError("no kernel")
        if mistake == "rounding":
            # Four times as coarse as TF32.
            values = values + 2.0**-9 * mx.random.normal(values.shape, key=mx.random.key(1)) * values.std()
        seen = mx.zeros_like(mask) if mistake == "mask" else mask
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen)

    monkeypatch.setattr(padded, "attention_in_products", wrong)
    given = case("bert-mean")
    opened = engine_of(write(tmp_path, given))
    assert (opened._model._replays is None) == (mistake != "none") == bool(caplog.records)  # type: ignore[attr-defined]
    made, _ = run(opened, [TextsRequest(0, given["texts"])])
    test_equality.near(made[0], np.array(given["vectors"], np.float32), "embedding")


def operations(*arrays: mx.array) -> list[str]:
    """The names of the operations in the graph of these arrays."""
    text: Any = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return re.findall(r'label ?="([^"]+)", shape=rectangle', text.getvalue())


@pytest.fixture
def minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VectorEngine:
    """A BERT of six layers, whose norms are one operation as on a GPU."""
    for norm in ("layer_norm", "rms_norm"):
        monkeypatch.setattr(mx.fast, norm, lambda states, *_: mx.sort(states, axis=-1))
    given = case("bert-mean")
    shapes = {name: shape for name, shape in given["shapes"].items() if ".layer.0." not in name}
    of_layer = {name: shape for name, shape in given["shapes"].items() if ".layer.0." in name}
    for index in range(6):
        shapes |= {name.replace(".layer.0.", f".layer.{index}."): shape for name, shape in of_layer.items()}
    return engine_of(
        write(tmp_path, {**given, "shapes": shapes, "config": {**given["config"], "num_hidden_layers": 6}})
    )


@pytest.mark.parametrize("texts", [1, 8, 64])
def test_a_request_is_three_fifths_of_the_operations_of_mlx_embeddings(
    minilm: VectorEngine, texts: int
) -> None:
    """And is built without Python: on a GPU the host's operations are the time of few texts."""
    given = [[5] * (9 + index % 7) for index in range(texts)]
    replays = replays_of(minilm)
    assert replays.begin(given, []) is not None
    job, calls = calls_of(lambda: replays.begin(given, []))
    made = len(operations(*(vectors for vectors, _ in job._parts)))
    print(f"{texts} texts: {made} operations, {calls} calls")
    assert made * 5 <= THEIR_OPERATIONS * 3
    assert calls * 10 <= THEIR_CALLS + 30 * texts


def test_shapes_repeat() -> None:
    """Few of them are traced, whatever texts come, and padding of large ones is at most a quarter."""
    traced = []

    def forward(batch: Any) -> mx.array:
        traced.append(len(batch.ids))
        made: mx.array = batch.mean(batch.ids[:, None])
        return made

    replays = Replays(forward, context_tokens=512, free_tokens=16_384, tokens_max=16_384, heads=4)
    shapes = set()
    for texts in range(1, 33):
        for length in range(1, 513, 7):
            job = replays.begin([[3] * length] * texts, [])
            if job is not None:
                job.step(1)
                assert job.result().tolist() == [[3.0]] * texts
                shapes.add((rounded(texts, 8), rounded(length, 64)))
    assert len(traced) == len(shapes) <= 12 * 19
    for count in range(1, 2000):
        assert count <= rounded(count, 8) < max(2 * count, 2)
        assert rounded(count, 8) <= max(8, 1.25 * count)


def test_padding_that_takes_time_is_half_of_a_shape_at_most() -> None:
    """Texts of other lengths get other shapes; the vectors come in the order of the texts."""
    shapes = []

    def forward(batch: Any) -> mx.array:
        shapes.append((batch._texts, batch._longest))
        made: mx.array = batch.mean(batch.ids[:, None])
        return made

    lengths = [3, 70, 5, 300, 9, 12, 66, 31, 3, 290, 8] * 12
    texts = [[place + 1] * length for place, length in enumerate(lengths)]
    replays = Replays(forward, context_tokens=512, free_tokens=64, tokens_max=4096, heads=4)
    job = replays.begin(texts, [])
    assert job is not None
    assert job.step(1) <= 2 * sum(lengths)
    assert job.result()[:, 0].tolist() == [place + 1 for place in range(len(texts))]
    assert max(rows * columns for rows, columns in shapes) <= 4096
    free = Replays(forward, context_tokens=512, free_tokens=4096, tokens_max=4096, heads=4)
    shapes.clear()
    free.begin(texts[:11], [])
    assert shapes == [(12, 320)]
    assert replays.begin([[5] * 5000], []) is None


@pytest.mark.parametrize(("length", "shapes_count"), [(3, 1), (2, 2)])
def test_padding_takes_no_longer_than_to_launch_another_shape(length: int, shapes_count: int) -> None:
    """A rectangle of 12 rows and 8 columns has 55 tokens of padding, or 66."""
    shapes = []

    def forward(batch: Any) -> mx.array:
        shapes.append(batch._texts)
        return mx.zeros((batch._texts, 4))

    replays = Replays(forward, context_tokens=512, free_tokens=64, tokens_max=4096, heads=4)
    replays.begin([[5] * 8, *[[6] * length] * 11], [])
    assert len(shapes) == shapes_count


def test_on_metal_a_batch_that_fills_the_device_is_not_padded(tmp_path: Path) -> None:
    """There padding takes longer than operations."""
    given = case("bert-mean")
    layer_floats = 8_000
    opened = engine_on(write(tmp_path, given), replace(METAL, replays=ReplayBounds(64 * layer_floats)))
    replays = replays_of(opened)
    assert replays.begin([[5] * 8], []) is not None
    assert replays.begin([[5] * 300], []) is None
    made, _ = run(opened, [TextsRequest(0, given["texts"])])
    test_equality.near(made[0], np.array(given["vectors"], np.float32), "embedding")


class Launches(CountedModel):
    """A model that records the order of its launches and reads."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 1e-6, 16)
        self.events: list[str] = []

    def begin(self, texts: Any, second: Any) -> Any:
        job = super().begin(texts, second)
        step, result = job.step, job.result

        def launch(tokens_max: int) -> int:
            self.events.append(f"launch {texts[0][0]}")
            return step(1 << 20)

        def read() -> np.ndarray:
            self.events.append(f"read {texts[0][0]}")
            return result()

        job.step, job.result = launch, read  # type: ignore[method-assign]
        return job


def test_a_batch_is_launched_before_the_one_before_it_is_read() -> None:
    """So the device computes while the host hands vectors over and builds; one text is read in the next step."""
    model = Launches(clock := Clock())
    late = EmbeddingEngine(model, INFO, clock=clock, is_gpu=True)
    late.embed([TextsRequest(0, [[number] * 16 for number in (1, 2, 3)])])
    assert late.next().vectors == []
    given = [len(vectors.vectors) for _ in range(3) for vectors in late.next().vectors]
    assert given == [1, 1, 1]
    assert model.events == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert late.next().vectors == []
    assert late.stats().steps == 4


def test_a_batch_in_flight_is_dropped_with_its_row_and_at_the_end() -> None:
    """Its vectors go to no later row."""
    model = Launches(clock := Clock())
    late = EmbeddingEngine(model, INFO, clock=clock, is_gpu=True)
    late.embed([TextsRequest(0, [[1] * 16])])
    late.next()
    late.remove([0])
    late.embed([TextsRequest(1, [[2] * 16])])
    assert [vectors.row for _ in range(2) for vectors in late.next().vectors] == [1]
    late.embed([TextsRequest(2, [[3] * 16])])
    late.next()
    late.close()
    assert late.next().vectors == []
    assert model.events == ["launch 1", "launch 2", "read 1", "read 2", "launch 3"]
