"""The engine of texts: turns, bounded steps, rows that leave, checkpoints that cannot be served."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.embedding.checkpoints import case, engine_of, run, write
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.engine.embedding import cpu, packing
from zmqengine.engine.embedding.engine import SHARED_STEP_S, EmbeddingEngine
from zmqengine.engine.embedding.packing import Packed
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.fake.fake_vector_engine import FakeVectorEngine
from zmqengine.engine.interface import Engine, ModelInfo, StepResult, TextsRequest, VectorEngine
from zmqengine.engine.models import arrays
from zmqengine.engine.step.step_clock import StepClock
from zmqengine.engine.texts.text_rows import TextPlace, TextRows
from zmqengine.errors import ModelLoadError

INFO = ModelInfo("counted", 1000, 512, frozenset(), 0, generates=False, dimensions=2)


class Clock(StepClock):
    """Seconds that parts of jobs take, set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(computes=False)

    def start(self) -> None:
        self._began_s = self.now_s

    def seconds(self) -> float:
        return self.now_s - self._began_s


class CountedJob:
    """A batch of three layers, which take a time in proportion to its tokens."""

    def __init__(self, model: CountedModel, texts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._texts = texts
        self._layers = 0

    def step(self, tokens_max: int) -> int:
        tokens = sum(map(len, self._texts))
        layers = min(3 - self._layers, max(1, 3 * tokens_max // tokens))
        self._layers += layers
        self._model.clock.now_s += tokens * layers / 3 * self._model.token_s
        self._model.batches += [len(self._texts)] * (self._layers == 3)
        return tokens * layers // 3

    @property
    def is_launched(self) -> bool:
        return self._layers == 3

    def result(self) -> np.ndarray:
        self._model.read += 1
        return np.array([[len(text), text[0]] for text in self._texts], np.float32)


class CountedModel:
    """A model of texts with known times."""

    def __init__(self, clock: Clock, token_s: float, tokens_max: int = 64) -> None:
        self.clock, self.token_s = clock, token_s
        self.width, self.tokens_max, self.workspace_bytes = 2, tokens_max, 0
        self.batches: list[int] = []
        self.read = 0

    def padded_max(self, tokens_max: int) -> int:
        return 100 * tokens_max

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> CountedJob:
        return CountedJob(self, texts)


def rows_of(*lengths: Sequence[int]) -> TextRows:
    rows = TextRows()
    for row, counts in enumerate(lengths):
        rows.add(TextsRequest(row, [[1] * count for count in counts]))
    return rows


def test_every_row_has_its_turn() -> None:
    """A query of one text does not wait for the 256 texts of another row."""
    rows = rows_of([4] * 256, [9])
    taken = [rows.take(16, 16) for _ in range(70)]
    assert (1, 0, 9) in [place for batch in taken[:2] for place in batch]
    assert all(sum(place.tokens for place in batch) <= 16 for batch in taken)
    assert sum(map(len, taken)) == 257
    assert rows.take(16, 16) == []


def test_a_batch_has_texts_of_about_one_length() -> None:
    """Padding is computed too."""
    assert [place.tokens for place in rows_of([30, 2, 31, 3, 32, 2]).take(64, 64)] == [30, 31]
    assert [place.tokens for place in rows_of([2, 30, 3, 31, 2]).take(16, 16)] == [2, 3]
    assert [place.tokens for place in rows_of([3, 2, 30]).take(16, 16)] == [2, 3]


@pytest.mark.parametrize(
    ("tokens_max", "padded_max", "lengths"),
    [(37, 120, [2, 2, 3, 30]), (36, 120, [2, 3, 30]), (37, 119, [2, 3, 30]), (37, 1, [30])],
)
def test_a_batch_is_bounded_with_padding_and_without(
    tokens_max: int, padded_max: int, lengths: list[int]
) -> None:
    """Time goes by tokens, and memory by the rectangle that holds them."""
    taken = rows_of([30, 2, 31, 3, 2]).take(tokens_max, padded_max)
    assert [place.tokens for place in taken] == lengths


def test_a_text_over_the_bound_is_a_batch_alone() -> None:
    """It has to be computed some time, but not in the place that is left beside another one."""
    assert [place.tokens for place in rows_of([100, 3]).take(16, 16)] == [100]
    assert rows_of([100, 3]).take(16, 16, whole=True) == []


def test_texts_that_fit_in_a_batch_are_one() -> None:
    """In their order, so that a row's vectors are handed over in one piece."""
    places = rows_of([30, 2, 31], [3]).take(66, 31 * 4)
    assert places == [(0, 0, 30), (1, 0, 3), (0, 1, 2), (0, 2, 31)]
    assert len(rows_of([30, 2, 31], [3]).take(65, 31 * 4)) < 4
    assert len(rows_of([30, 2, 31], [3]).take(66, 31 * 4 - 1)) < 4


def test_vectors_of_several_rows_go_to_their_own() -> None:
    """In order and as short as asked, whether they come in order, out of order or after their row has left."""
    rows = TextRows()
    for row, dimensions in ((0, None), (1, 2), (2, None), (3, None)):
        rows.add(TextsRequest(row, [[1]] * 3, dimensions=dimensions))
    rows.take(12, 12)
    del rows.rows[3]
    vectors = np.arange(1, 31, dtype=np.float32).reshape(10, 3)
    vectors[6] = np.inf
    order = [(0, 0), (1, 2), (0, 1), (3, 0), (1, 0), (2, 0), (2, 1), (0, 2), (3, 1), (2, 2)]
    result = StepResult()
    rows.settle([TextPlace(row, text, 1) for row, text in order], vectors, result)
    given = {row: (made, is_whole) for row, made, is_whole in result.vectors}
    assert given.keys() == {0, 1}
    np.testing.assert_array_equal(given[0][0], vectors[[0, 2, 7]])
    short = vectors[4:5, :2] / np.linalg.norm(vectors[4, :2])
    np.testing.assert_allclose(given[1][0], short, rtol=1e-6)
    assert (given[0][1], given[1][1]) == (True, False)
    assert [(failure.row, failure.message) for failure in result.failures] == [
        (2, "text 1 gave numbers that are not finite")
    ]
    assert [(prefill.row, prefill.done) for prefill in result.prefills] == [(0, 3), (1, 2)]
    result = StepResult()
    rows.settle([TextPlace(1, 1, 1)], vectors[:1], result)
    ((row, made, is_whole),) = result.vectors
    assert (row, made.shape, is_whole) == (1, (2, 2), True)
    np.testing.assert_allclose(made[1], vectors[1, :2] / np.linalg.norm(vectors[1, :2]), rtol=1e-6)
    assert not rows.rows


def test_vectors_come_in_the_order_of_the_texts() -> None:
    """Though batches are sorted by length."""
    engine = EmbeddingEngine(CountedModel(clock := Clock(), 1e-6), INFO, clock=clock)
    texts = [[index, *[1] * (index * 7 % 30)] for index in range(1, 60)]
    made, failures = run(engine, [TextsRequest(0, texts), TextsRequest(1, texts[::-1])])
    assert failures == []
    assert made[0].tolist() == [[len(text), text[0]] for text in texts]
    assert made[1].tolist() == made[0][::-1].tolist()


@pytest.mark.parametrize("elsewhere", [0, 3])
@pytest.mark.parametrize("long", [False, True])
def test_a_step_of_an_encoder_takes_a_bounded_time(elsewhere: int, long: bool) -> None:
    """On a machine whose speed is not known before, with texts that fit in a step, and a longer one layer by layer.

    A step is short while rows of other processes decode, which wait for the device.
    """
    engine = EmbeddingEngine(CountedModel(clock := Clock(), 5e-5, 2048), INFO, step_s=0.05, clock=clock)
    limit_s = SHARED_STEP_S if elsewhere else 0.05
    engine.embed([TextsRequest(1, [[1] * (3000 if long else 20)] * 4000)])
    steps = []
    for _ in range(60):
        before_s = clock.now_s
        engine.next(elsewhere)
        steps.append(clock.now_s - before_s)
    layer_s = 3000 * 5e-5 / 3
    assert max(steps[20:]) <= (max(limit_s, layer_s) if long else limit_s) * 1.1
    assert sum(steps[20:]) / 40 > limit_s * 0.7


def test_a_row_that_leaves_takes_its_texts_along() -> None:
    """Those of a batch under way are computed and dropped; the other rows get theirs."""
    model = CountedModel(clock := Clock(), 1.0)
    engine = EmbeddingEngine(model, INFO, clock=clock)
    engine.embed([TextsRequest(1, [[1] * 9] * 50), TextsRequest(2, [[2] * 9] * 3)])
    engine.next()
    engine.remove([1])
    made, _ = run(engine, [TextsRequest(3, [[3] * 9] * 2)])
    assert len(made[3]) == 2
    assert engine.stats().rows_prefilling <= 1
    assert sum(model.batches) < 50


def engines() -> list[VectorEngine]:
    """One of each kind that the worker has, of four rows."""
    made = EmbeddingEngine(CountedModel(clock := Clock(), 1e-6), INFO, rows_max=4, clock=clock)
    late = EmbeddingEngine(CountedModel(clock, 1e-6), INFO, rows_max=4, clock=clock, is_gpu=True)
    return [made, late, FakeVectorEngine(FakeEngineConfig(dimensions=2, rows_max=4, generates=False))]


@pytest.mark.parametrize("engine", engines(), ids=["MLX", "MLX on a GPU", "fake"])
def test_an_engine_of_vectors_keeps_its_contract(engine: VectorEngine) -> None:
    """And is none of those that generate."""
    assert not isinstance(engine, Engine)
    failures = engine.embed([TextsRequest(row, [[row + 1] * 5, [row + 2]]) for row in range(6)])
    assert [failure.row for failure in failures] == [4, 5]
    assert engine.stats().rows_prefilling == 4
    engine.remove([1, 1, 77])
    made: dict[int, list[np.ndarray]] = {}
    whole: set[int] = set()
    while whole < {0, 2, 3}:
        result = engine.next(rows_elsewhere=1)
        assert (result.tokens, result.failures) == ([], [])
        for row, vectors, is_whole in result.vectors:
            assert row not in whole
            assert vectors.dtype == np.float32
            made.setdefault(row, []).extend(vectors)
            whole |= {row} if is_whole else set()
    assert {row: len(vectors) for row, vectors in made.items()} == {0: 2, 2: 2, 3: 2}
    stats, memory = engine.stats(), engine.memory()
    assert (stats.rows_prefilling, stats.generated_tokens) == (0, 0)
    assert stats.prompt_tokens >= 18
    assert memory.kv == memory.prompt_cache == 0
    engine.embed([TextsRequest(9, [[1]])])
    engine.close()
    engine.close()
    assert engine.next().vectors == []
    assert engine.stats().rows_prefilling == 0


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("is_device", [False, True])
def test_a_step_that_fails_drops_every_row(is_gpu: bool, is_device: bool) -> None:
    """And makes the next batches smaller if the device failed: they ran out of its time or memory."""
    model = CountedModel(clock := Clock(), 1e-6, 4096)
    engine = EmbeddingEngine(model, INFO, clock=clock, is_gpu=is_gpu)
    engine.embed([TextsRequest(0, [[1] * 9] * 4)])
    message = "[malloc] Unable to allocate 1073741824 bytes." if is_device else "a mistake"

    def failing(*_: object) -> CountedJob:
        raise RuntimeError(message)

    begin, model.begin = model.begin, failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match=re.escape(message)):
        engine.next()
    model.begin = begin  # type: ignore[method-assign]
    assert engine.stats().rows_prefilling == 0
    for _ in range(2):
        assert engine.next().vectors == []
    assert model.tokens_max == (2048 if is_device else 4096)
    made, failures = run(engine, [TextsRequest(0, [[5] * 3])])
    assert (made[0].tolist(), failures) == ([[3.0, 5.0]], [])


def test_a_part_of_few_tokens_has_several_layers(tmp_path: Path) -> None:
    """A query is one wait for the device; a large batch is a layer at a time, so that streams wait no longer."""
    model = engine_of(write(tmp_path, case("bert-mean")))._model  # type: ignore[attr-defined]
    made = []
    for tokens_max, parts in ((1, [1, 1, 1]), (3, [2, 1]), (4, [4])):
        job = model.begin([[7, 8, 9, 10]], [])
        assert [job.step(tokens_max) for _ in parts] == parts
        assert job.is_launched
        made.append(job.result())
    np.testing.assert_allclose(made, [made[0]] * 3, atol=1e-6)


def test_numbers_that_are_not_finite_end_their_row_alone(tmp_path: Path) -> None:
    """A checkpoint with a broken array gives an error and no NaN."""
    given = case("bert-mean")
    engine = engine_of(write(tmp_path, given))
    encoder = engine._model._encoder  # type: ignore[attr-defined]
    encoder.word.weight[7] = float("nan")
    made, failures = run(engine, [TextsRequest(0, [[7, 8]]), TextsRequest(1, [[8, 9]])])
    assert [failure.row for failure in failures] == [0]
    assert "not finite" in failures[0].message
    assert np.isfinite(made[1]).all()


def rewritten(directory: Path, file: str, **fields: object) -> Path:
    path = directory / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return directory


def test_a_checkpoint_says_how_long_a_text_may_be(tmp_path: Path) -> None:
    """The table of positions bounds it, the tokenizer's limit and sentence-transformers' own."""
    directory = write(tmp_path, case("xlm-roberta-cls"))
    assert engine_of(directory).info.context_tokens == 128
    rewritten(directory, "tokenizer_config.json", model_max_length=100)
    assert engine_of(directory).info.context_tokens == 100
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert engine_of(directory).info.context_tokens == 64


@pytest.mark.parametrize(
    ("file", "fields", "told"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "the pooling weightedmean is none of"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "max"]}, "the pooling cls, max is none of"),
        ("1_Pooling/config.json", {"include_prompt": False}, "leaves out the prompt is not supported"),
        (
            "config.json",
            {"position_embedding_type": "relative_key"},
            "positions of the type 'relative_key': a bert here has absolute or alibi ones",
        ),
        (
            "config.json",
            {"position_embedding_type": "alibi", "feed_forward_type": "original"},
            "feed_forward_type is 'original', none of geglu, reglu",
        ),
        (
            "config.json",
            {"position_embedding_type": "alibi", "architectures": ["JinaBertForSequenceClassification"]},
            "JinaBertForSequenceClassification: heads for scores are supported on BERT",
        ),
        ("config.json", {"model_type": "nomic_bert", "num_experts": 8}, "has 8 experts: a nomic_bert here"),
        (
            "config.json",
            {"model_type": "nomic_bert", "prenorm": True},
            "prenorm is True; only False is supported",
        ),
        (
            "config.json",
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
            "Qwen3ForSequenceClassification: heads for scores are supported on BERT",
        ),
        ("config.json", {"model_type": "mpnet"}, "neither mlx-lm nor an encoder here reads a 'mpnet'"),
        (
            "config.json",
            {"model_type": "jina_embeddings_v3"},
            "neither mlx-lm nor an encoder here reads a 'jina_embeddings_v3'",
        ),
        (
            "config.json",
            {"model_type": "xlm-roberta", "position_embedding_type": "rotary"},
            "positions of the type 'rotary': a xlm-roberta here has absolute ones",
        ),
        ("config.json", {"hidden_act": "mish"}, "the activation 'mish' is none of"),
        ("config.json", {"intermediate_size": 64}, "are not those of its config.json"),
        ("config.json", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, file: str, fields: dict[str, object], told: str
) -> None:
    """With what is wrong with it, when the worker starts."""
    directory = rewritten(write(tmp_path, case("bert-mean")), file, **fields)
    with pytest.raises(ModelLoadError, match=told):
        engine_of(directory)


@pytest.mark.parametrize("field", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_a_decoder_that_attends_in_both_directions_is_refused(tmp_path: Path, field: dict[str, bool]) -> None:
    """With causal attention it would make other vectors without an error."""
    directory = rewritten(write(tmp_path, case("qwen3-last")), "config.json", **field)
    with pytest.raises(ModelLoadError, match="attends in both directions"):
        engine_of(directory)


def test_an_embedder_without_the_names_of_a_language_model_is_read(tmp_path: Path) -> None:
    """Qwen3-Embedding is published as its layers alone; its vectors are the same."""
    given = case("qwen3-last")
    directory = write(tmp_path, given)
    arrays = mx.load(str(directory / "model.safetensors"))
    assert isinstance(arrays, dict)
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    assert bare.keys() != arrays.keys()
    mx.save_safetensors(str(directory / "model.safetensors"), bare)
    made, _ = run(engine_of(directory), [TextsRequest(0, given["texts"])])
    np.testing.assert_allclose(made[0], given["vectors"], atol=1e-5)


def test_layers_alone_of_a_model_with_a_head_of_its_own_generate_nothing(tmp_path: Path) -> None:
    """As e5-mistral is published: its vectors are there, its head is not."""
    given = case("qwen3-last")
    directory = rewritten(write(tmp_path, given), "config.json", tie_word_embeddings=False)
    arrays = mx.load(str(directory / "model.safetensors"))
    assert isinstance(arrays, dict)
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), bare)
    engine = engine_of(directory)
    assert not engine.info.generates
    made, _ = run(engine, [TextsRequest(0, given["texts"])])
    np.testing.assert_allclose(made[0], given["vectors"], atol=1e-5)


def test_a_quantized_encoder_gives_the_vectors_of_its_arrays(tmp_path: Path) -> None:
    """As checkpoints for MLX are published: some modules are quantized, under the names that they had before."""
    given = case("bert-mean")
    vectors = []
    for packed in (True, False):
        directory = tmp_path / str(packed)
        directory.mkdir()
        arrays = mx.load(str(write(directory, given) / "model.safetensors"))
        assert isinstance(arrays, dict)
        for name in [name for name in arrays if arrays[name].ndim == 2 and arrays[name].shape[1] == 32]:
            quantized, scales, biases = mx.quantize(arrays[name], group_size=32, bits=8)
            if packed:
                stem = name.removesuffix("weight")
                arrays |= {name: quantized, f"{stem}scales": scales, f"{stem}biases": biases}
            else:
                arrays[name] = mx.dequantize(quantized, scales, biases, group_size=32, bits=8)
        mx.save_safetensors(str(directory / "model.safetensors"), arrays)
        if packed:
            rewritten(directory, "config.json", quantization={"group_size": 32, "bits": 8})
        vectors.append(run(engine_of(directory), [TextsRequest(0, given["texts"])])[0][0])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    rewritten(tmp_path / "True", "config.json", quantization={})
    with pytest.raises(ModelLoadError, match="the arrays are quantized, and quantization lacks"):
        engine_of(tmp_path / "True")


def test_a_nomic_checkpoint_is_read_by_its_older_names(tmp_path: Path) -> None:
    """Vectors equal those of the code that the model was published with."""
    given = case("nomic-mean")
    directory = write(tmp_path, given)
    arrays = mx.load(str(directory / "model.safetensors"))
    assert isinstance(arrays, dict)
    joined = [name for name in arrays if ".q_proj." in name]
    for name in joined:
        parts = [arrays.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        arrays[name.replace("self_attn.q_proj", "attn.Wqkv")] = mx.concatenate(parts)
    for new, old in (
        ("self_attn.o_proj", "attn.out_proj"), ("up_proj", "fc11"), ("gate_proj", "fc12"), ("down_proj", "fc2"),
        ("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2"), ("layers.", "encoder.layers."),
        ("embeddings.LayerNorm", "emb_ln"),
    ):  # fmt: skip
        arrays = {name.replace(new, old): array for name, array in arrays.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    config = given["config"]
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps"}  # fmt: skip
    older = {old: config[new] for old, new in names.items()}
    older |= {"model_type": "nomic_bert", "vocab_size": config["vocab_size"], "activation_function": "swiglu",
              "rotary_emb_base": 1000, "max_trained_positions": 128}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(older))
    engine = engine_of(directory)
    assert engine.info.context_tokens == 128
    made, _ = run(engine, [TextsRequest(0, given["texts"])])
    np.testing.assert_allclose(made[0], given["vectors"], atol=1e-5)


def test_older_checkpoints_name_their_pooling_by_flags(tmp_path: Path) -> None:
    """As all of those that were published before 2026 do."""
    directory = write(tmp_path, case("bert-mean"))
    flags = {
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
        "word_embedding_dimension": 32,
    }
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    assert read_recipe(directory).pooling == "cls"


def test_a_conversion_without_its_pooling_is_refused(tmp_path: Path) -> None:
    """The mean of a model that wants its first token would be another vector without an error."""
    directory = write(tmp_path, case("bert-cls-tanh"))
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1_Pooling/config\.json, which modules.json names: copy"):
        read_recipe(directory)


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """A late-interaction model has no vector for a text."""
    directory = write(tmp_path, case("bert-mean"))
    (directory / "modules.json").write_text('[{"path": "", "type": "pylate.models.ColBERT"}]')
    with pytest.raises(ModelLoadError, match="'ColBERT'"):
        read_recipe(directory)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_the_own_softmax_is_that_of_mlx(
    monkeypatch: pytest.MonkeyPatch, window: int | None, key_heads: int
) -> None:
    """Padded texts of three lengths, above the number of scores from which the own softmax is used."""
    packed = Packed([[1] * length for length in (90, 7, 64)], (), cpu.attention)
    queries, keys, values = (
        mx.random.normal((161, heads * 8), key=mx.random.key(heads + index)) * 4
        for index, heads in enumerate((4, key_heads, key_heads))
    )
    heads = (
        *packed.heads(queries, [4]),
        *packed.heads(keys, [key_heads]),
        *packed.heads(values, [key_heads]),
    )
    made = packed.attend(*heads, scale=1.0, window=window)
    assert cpu.SCORES_MIN < 3 * 4 * 90 * 90
    monkeypatch.setattr(cpu, "SCORES_MIN", 1 << 40)
    np.testing.assert_allclose(made, packed.attend(*heads, scale=1.0, window=window), atol=1e-5)


def test_distances_count_in_half_precision_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints for a GPU have it; a long text has its queries cut, so that its distances fit in memory."""
    packed = Packed([[1] * 20, [1] * 9], (), cpu.attention)
    queries = mx.random.normal((29, 32), key=mx.random.key(1))
    made = []
    for dtype, scores_bytes_max in ((mx.float32, 1 << 28), (mx.bfloat16, 1 << 28), (mx.float32, 5 * 4 * 160)):
        monkeypatch.setattr(packing, "SCORES_BYTES_MAX", scores_bytes_max)
        (heads,) = packed.heads(queries.astype(dtype), [4])
        attended = packed.attend(heads, heads, heads, scale=0.3, slopes=mx.array([0.5, 0.25, 0.1, 0.0]))
        made.append(np.array(attended.astype(mx.float32)))
    np.testing.assert_allclose(made[1], made[0], atol=0.05)
    np.testing.assert_allclose(made[2], made[0], atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu"])
def test_activations_are_as_exact_as_those_of_mlx(name: str) -> None:
    """To float32's rounding, on both sides of the bounds beyond which they are constant."""
    x = np.linspace(-12, 12, 20_001)
    given = mx.array(x.astype(np.float32))
    inner = {
        "gelu": np.vectorize(math.erf)(x / math.sqrt(2)),
        "gelu_new": np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
        "silu": np.tanh(x / 2),
    }[name]
    errors = [
        np.abs(np.array(of(name)(given), np.float64) - x * (1 + inner) / 2).max()
        for of in (cpu.activation, arrays.activation)
    ]
    assert errors[0] <= max(3 * errors[1], 4e-6)
