"""The forward pass of a GPU, on the CPU: padded shapes, replayed in one call, and vectors that are read a step late."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.embedding import test_equality
from tests.embedding.checkpoints import NAMES, case, engine_of, run, write
from tests.embedding.test_engine import INFO, Clock, CountedModel
from tests.support import cuda_kernels, cuda_on_cpu
from tests.support.calls import calls_of
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.engine.autotune.variants import Agree, Timing, Variant, same_but_for_rounding
from zmqengine.engine.cuda import kernel, text_kernels
from zmqengine.engine.cuda.text_kernels import supports
from zmqengine.engine.embedding import (
    attention,
    encoder_model,
    engine,
    opening,
    packing,
    padded,
    product,
    replay,
)
from zmqengine.engine.embedding.encoder_model import TextEncoder
from zmqengine.engine.embedding.encoders import activations
from zmqengine.engine.embedding.engine import EmbeddingEngine
from zmqengine.engine.embedding.host_memory import VECTORS_SIZE
from zmqengine.engine.embedding.padded import Padded
from zmqengine.engine.embedding.replay import RaggedReplays, Replays, rounded
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.host.environment import TF32_VARIABLE
from zmqengine.engine.interface import TextsRequest, VectorEngine

THEIR_OPERATIONS = 343
"""MLX operations of mlx-embeddings 0.1.0 for one text, by a BERT of six layers in float32; a norm counts as one."""
THEIR_CALLS = 467
"""Python calls of mlx-embeddings that build them."""
THEIR_KERNELS = 142
"""Kernels that those launch on CUDA: operations that are no views, and four copies a layer, of heads before products
and behind them (`check_transpose` in mlx/backend/cuda/matmul.cpp)."""
_VIEWS = {"Broadcast", "Transpose", "Reshape", "Split", "Slice", "Squeeze", "ExpandDims"}


@pytest.fixture
def padded_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices that are made on a GPU without our kernels; MLX computes on its default device."""
    for module in (activations, attention, encoder_model, engine, opening, packing):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    monkeypatch.setattr(encoder_model, "on_cuda", lambda: True)
    monkeypatch.setattr(text_kernels, "supports", lambda _: False)
    monkeypatch.setenv(TF32_VARIABLE, "1")


@pytest.fixture(params=["padded", "kernels in plain arithmetic", "kernels as written"])
def on_a_gpu(
    request: pytest.FixtureRequest, padded_only: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The choices that are made on a GPU, with kernels for CUDA and without."""
    if request.param == "padded":
        yield request.param
        return
    as_written = request.param == "kernels as written"
    if on_cuda():
        pytest.skip("the device runs them")
    if as_written and not cuda_on_cpu.COMPILER:
        pytest.skip("g++ is not installed")
    compiled = mx.compile
    cuda_kernels.stand_in(monkeypatch, as_written=as_written)
    # Their text computes at once, which a trace cannot hold.
    monkeypatch.setattr(mx, "compile", (lambda function: function) if as_written else compiled)
    if not as_written:
        monkeypatch.setattr(text_kernels, "deliver", lambda vectors, memory: vectors)
    monkeypatch.setattr(text_kernels, "supports", supports)
    monkeypatch.setattr(text_kernels, "multiprocessors", lambda: 1)
    monkeypatch.setattr(replay, "_TUNED_TOKENS", (256, 1024))
    # On a CPU the text of the product takes minutes; `tests/engine/cuda/test_text_kernels.py` tries it.
    monkeypatch.setattr(replay, "fastest", (lambda *_, **__: Timing("cuBLAS", {})) if as_written else tried)
    yield request.param
    monkeypatch.undo()
    cuda_kernels.forget()


def tried(variants: Mapping[str, Variant], calls: int, agree: Agree) -> Timing:
    """All of them in turn, which agree; the last one is said to be the fastest."""
    assert calls == 1
    first, *others = (variant() for variant in variants.values())
    assert all(agree(other, first) and same_but_for_rounding(other, first, 1e-5) for other in others)
    return Timing([*variants][-1], {})


@pytest.fixture
def replays_only(on_a_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `on_a_gpu`, and a batch that is not replayed fails."""
    for kind in (RaggedReplays, Replays):
        monkeypatch.setattr(kind, "begin", checked(kind.begin))


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
    test_equality.check(tmp_path / "again", given)


@pytest.mark.usefixtures("replays_only")
@pytest.mark.parametrize(("act", "heads"), [("geglu", 4), ("reglu", 3)])
def test_vectors_of_jinas_padded_texts_are_those_of_the_paper(act: str, heads: int, tmp_path: Path) -> None:
    """Scores that fall with the distance are terms of the same masks."""
    test_equality.check(tmp_path, test_equality.jina(act, heads))


@pytest.mark.usefixtures("replays_only")
def test_a_request_of_texts_of_all_lengths_is_one_batch(tmp_path: Path) -> None:
    """The pace counts their tokens: replays do not pad short texts to the longest."""
    engine = engine_of(write(tmp_path, case("bert-mean")))
    engine.embed([TextsRequest(0, [[5] * 40, *[[6] * 5] * 40])])
    assert not engine.next().vectors
    assert [vectors.is_whole for vectors in engine.next().vectors] == [True]


@pytest.mark.usefixtures("on_a_gpu")
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
    for kind in (RaggedReplays, Replays):
        monkeypatch.setattr(kind, "begin", lambda *_: None)
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
def test_a_token_that_is_not_finite_ends_its_text_alone(on_a_gpu: str, tmp_path: Path) -> None:
    """Its neighbours in the rectangle are as long with padding, which is none of its tokens; those in the thread block
    of a kernel leave its values out."""
    if on_a_gpu == "kernels in plain arithmetic":
        pytest.skip("a product takes all values")
    opened = engine_of(write(tmp_path, case("bert-mean")))
    opened._model._encoder.word.weight[0] = float("nan")  # type: ignore[attr-defined]
    made, failures = run(
        opened, [TextsRequest(0, [[7, 0, 7]]), TextsRequest(1, [[8, 9]]), TextsRequest(2, [[5]])]
    )
    assert [failure.row for failure in failures] == [0]
    assert np.isfinite([made[1], made[2]]).all()


@pytest.mark.usefixtures("padded_only")
@pytest.mark.parametrize("mistake", ["mask", "error", "none"])
def test_replays_that_are_wrong_on_this_device_are_not_used(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are compared when the model is opened; the vectors are right in any case."""

    def wrong(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array
    ) -> mx.array:
        if mistake == "error":
            raise RuntimeError("no kernel")
        seen = mask if mistake == "none" else mx.zeros_like(mask)
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
def by_kernels(padded_only: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our kernels, each an operation of its output's shape, and products in them said to be faster."""

    def cuda_kernel(*, name: str, **_: Any) -> Any:
        def call(*, inputs: list[mx.array], output_shapes: list[tuple[int, ...]], **_: Any) -> list[mx.array]:
            given, count = inputs[0], output_shapes[0][0]
            if name == "text_embed":
                copied = mx.broadcast_to(mx.array(0), output_shapes[1])
                return [mx.cumsum(mx.broadcast_to(inputs[2][:1], output_shapes[0]), axis=1), copied]
            if name == "text_deliver":
                return [mx.abs(given)]
            if name == "text_layers":
                return [mx.softmax(given, axis=1), given[:1]]
            if name.startswith("text_product"):
                return [given @ inputs[1], given[:1]][: len(output_shapes)]
            return [given.flatten(1) if name == "text_attention" else mx.log(given[:count])]

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(kernel, "kernel_cache", lambda: None)
    monkeypatch.setattr(text_kernels, "supports", supports)
    monkeypatch.setattr(TextEncoder, "_agrees", lambda *_: True)
    monkeypatch.setattr(replay, "fastest", lambda *_, **__: Timing("kernels", {}))
    cuda_kernels.forget()
    yield
    monkeypatch.undo()
    cuda_kernels.forget()


@pytest.fixture
def minilm(padded_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VectorEngine:
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
def test_a_request_is_two_fifths_of_the_operations_of_mlx_embeddings(
    minilm: VectorEngine, texts: int
) -> None:
    """And is built without Python: on a GPU the host's operations are the time of few texts."""
    given = [[5] * (9 + index % 7) for index in range(texts)]
    replays = replays_of(minilm)
    assert replays.begin(given, []) is not None
    job, calls = calls_of(lambda: replays.begin(given, []))
    made = len(operations(*(vectors for vectors, _ in job._parts)))
    print(f"{texts} texts: {made} operations, {calls} calls")
    assert made * 5 <= THEIR_OPERATIONS * 2
    assert calls * 10 <= THEIR_CALLS + 30 * texts


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(
    ("multiprocessors", "in_kernels_max", "kernels_count", "products"),
    [(1, 4096, 6, [0, 0]), (0, 4096, 35, [24, 0]), (1, 0, 52, [0, 24])],
)
@pytest.mark.parametrize("texts", [1, 8, 64])
def test_with_kernels_a_request_launches_two_fifths_of_the_kernels_of_mlx_embeddings(
    multiprocessors: int,
    in_kernels_max: int,
    kernels_count: int,
    products: list[int],
    texts: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one shape, whatever the lengths: all layers are a kernel, or a layer has five, and eight where four are
    cuBLAS's."""
    monkeypatch.setattr(text_kernels, "multiprocessors", lambda: multiprocessors)
    minilm = request.getfixturevalue("minilm")
    given = [[5] * (9 + 11 * index % 40) for index in range(texts)]
    replays: RaggedReplays = minilm._model._replays
    assert replays._in_kernels_max == 4096
    replays._in_kernels_max = in_kernels_max
    for _ in replays._memories:
        replays.begin(given, [])
    job, calls = calls_of(lambda: replays.begin(given, []))
    assert job is not None
    made = operations(job._made)
    # The stand-in for attention is a Flatten.
    launched = [name for name in made if name not in _VIEWS]
    attended, count = launched.count("Flatten"), len(launched)
    print(f"{texts} texts: {len(made)} operations, {count} kernels, {calls} calls: {made}")
    assert count == kernels_count <= THEIR_KERNELS * 2 // 5
    assert [launched.count(name) for name in ("Matmul", "AddMM")] == products
    assert attended == (6 if sum(products) else 0)
    assert calls * 10 <= THEIR_CALLS


@pytest.fixture
def not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that are read as arrays, as where they are too many."""
    monkeypatch.setattr(text_kernels, "deliver", lambda vectors, memory: vectors)


@pytest.mark.usefixtures("not_delivered")
@pytest.mark.parametrize(("slower", "tried"), [({128, 512}, [32, 64, 128]), ({32}, [32])])
def test_products_are_in_kernels_where_these_are_faster(
    slower: set[int], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the number of tokens before the first for which they were timed slower."""
    names, sizes = [], []

    def timed(variants: Mapping[str, Any], **_: Any) -> Timing:
        sizes.append(variants["kernels"].args[1].shape[1])
        return Timing("cuBLAS" if sizes[-1] in slower else "kernels", {})

    def forward(batch: Any) -> mx.array:
        names.append((len(batch.ids), product._kernels.get() is text_kernels))
        return mx.zeros((8, 4)) + batch.ids[:1, None]

    monkeypatch.setattr(replay, "fastest", timed)
    replays = RaggedReplays(forward, text_kernels, heads=4)
    replays.tune()
    assert sizes == tried
    for length in (50, 64, 65):
        replays.begin([[3] * length], [])
    assert names == [(64, 32 not in slower), (80, False)]
    names.clear()
    monkeypatch.setattr(replay, "fastest", lambda *_, **__: Timing("kernels", {}))
    replays.tune()
    for length in (2048, 2049):
        replays.begin([[3] * 2048, [3] * length], [])
    assert names == [(4096, True), (5120, False)]


@pytest.mark.usefixtures("by_kernels")
def test_products_are_not_in_kernels_where_the_user_forbids_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no other precision."""
    monkeypatch.setenv(TF32_VARIABLE, "0")
    opened = engine_of(write(tmp_path, case("bert-mean")))
    assert opened._model._replays._in_kernels_max == 0  # type: ignore[attr-defined]


def test_batches_in_the_same_memory_keep_their_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late these are read, and where they are too many for it."""

    def deliver(vectors: mx.array, memory: mx.array) -> mx.array:
        np.asarray(memory)[: vectors.size] = np.array(vectors).ravel()
        return mx.zeros((1,))

    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setattr(text_kernels, "deliver", deliver)
    replays = RaggedReplays(
        lambda batch: mx.broadcast_to(batch.ids[:, None].astype(mx.float32), (2, width)),
        text_kernels,
        heads=4,
    )
    for width in (3, VECTORS_SIZE):
        jobs = [replays.begin([[first], [first + 1]], []) for first in range(1, 6)]
        for first, job in enumerate(jobs, 1):
            assert job is not None
            found = job.result()
            assert found.shape == (2, width)
            assert found[:, -1].tolist() == [first, first + 1]


@pytest.mark.usefixtures("not_delivered")
def test_kernels_have_fewer_shapes_than_rectangles() -> None:
    """64 texts of any lengths are one of few shapes, in each of which tokens are padded by a quarter at most."""
    shapes = set()

    def forward(batch: Any) -> mx.array:
        shapes.add((batch._spans.shape, batch._texts.shape))
        return mx.zeros((64, 4)) + batch.ids[:1, None]

    lengths = np.random.default_rng(1).integers(5, 60, (50, 64))
    replays = RaggedReplays(forward, text_kernels, heads=12)
    for each in lengths.tolist():
        job = replays.begin([[3] * length for length in each], [])
        assert job is not None
        assert sum(each) <= job.step(1) <= 1.25 * sum(each)
    assert len(shapes) <= 3


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


def test_on_metal_a_batch_that_fills_the_device_is_not_padded(
    padded_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There padding takes longer than operations."""
    given = case("bert-mean")
    layer_floats = 8_000
    monkeypatch.setattr(encoder_model, "on_cuda", lambda: False)
    monkeypatch.setattr(encoder_model, "FREE_PRODUCTS_METAL", 64 * layer_floats)
    opened = engine_of(write(tmp_path, given))
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
    late = EmbeddingEngine(model, INFO, clock=clock, reads_late=True)
    late.embed([TextsRequest(0, [[number] * 16 for number in (1, 2, 3)])])
    assert late.next().vectors == []
    given = [len(vectors.vectors) for _ in range(3) for vectors in late.next().vectors]
    assert given == [1, 1, 1]
    assert model.events == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert late.next().vectors == []
    assert late.stats().steps == 4


def test_a_batch_in_flight_is_dropped_with_its_row_and_at_a_reset() -> None:
    """Its vectors go to no later row."""
    model = Launches(clock := Clock())
    late = EmbeddingEngine(model, INFO, clock=clock, reads_late=True)
    late.embed([TextsRequest(0, [[1] * 16])])
    late.next()
    late.remove([0])
    late.embed([TextsRequest(1, [[2] * 16])])
    assert [vectors.row for _ in range(2) for vectors in late.next().vectors] == [1]
    late.embed([TextsRequest(2, [[3] * 16])])
    late.next()
    late.reset()
    assert late.next().vectors == []
    assert model.events == ["launch 1", "launch 2", "read 1", "read 2", "launch 3"]
