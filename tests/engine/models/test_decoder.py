"""The decoder computes what mlx-lm's models compute, over the configurations of its family."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.models.families import FAMILY, MOE, PACKED, build_packed
from tests.support.models import LLAMA, MAMBA, MIXTURE, VOCAB_SIZE, build_model
from zmqengine.engine.cpu import numpy_ops
from zmqengine.engine.load.probe import rows_of
from zmqengine.engine.models import decoder as decoder_module
from zmqengine.engine.models.attention import WIDTH_MAX, PlacedPiece
from zmqengine.engine.models.decoder import DecoderModel, Inputs
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.layers import Unsupported
from zmqengine.engine.models.model_runner import ModelRunner, RowPiece
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner

# Arithmetic is in float32: another order of the same sums.
TOLERANCE = 1e-4
TEXTS = [list(range(5, 60)), [3, 1, 4, 1, 5], [9, 2, 6, *range(100, 140)], [7]]
WIDTHS = (1, 1, 3, 1, WIDTH_MAX, 1)


class Part(NamedTuple):
    """Consecutive tokens of a row in a step: those from `start` on. `tokens`: all up to its last one."""

    row: int
    start: int
    tokens: list[int]


def schedule(widths: Sequence[int], texts: Sequence[Sequence[int]] = TEXTS) -> Iterator[list[Part]]:
    """Steps: halves of prompts beside rows in decode, then steps of all rows of these widths, which are rolled back."""
    known = [list(text) for text in texts]
    halves = [max(1, len(text) // 2) for text in texts]
    yield [Part(row, 0, known[row][: halves[row]]) for row in (0, 2, 3)]
    yield [Part(0, halves[0], list(known[0])), Part(1, 0, list(known[1]))]
    for row in (0, 1):
        known[row].append(8)
    yield [Part(row, halves[row] if row == 2 else len(known[row]) - 1, list(known[row])) for row in (1, 2, 0)]
    if len(known[3]) > 1:
        yield [Part(3, halves[3], list(known[3]))]
    for turn, width in enumerate(widths):
        step = []
        for row, text in enumerate(known):
            new = [(row * 37 + at * 11 + turn) % VOCAB_SIZE for at in range(width)]
            step.append(Part(row, len(text), text + new))
            text.extend(new[: 1 + row % width])
        yield step


def steps(
    runner: ModelRunner, widths: Sequence[int] = WIDTHS, texts: Sequence[Sequence[int]] = TEXTS
) -> list[np.ndarray]:
    """Logits [tokens, vocab] of every part of `schedule`, all parts of a step in one call."""
    rows = rows_of(texts)
    found: list[np.ndarray] = []
    for step in schedule(widths, texts):
        pieces, tokens = [], []
        for number, start, whole in step:
            row, count = rows[number], len(whole) - start
            row.tokens, row.computed_tokens = whole, start
            if row.cache is None:
                row.cache = runner.open(len(whole))
            samples = count if count <= WIDTH_MAX else 0
            pieces.append(RowPiece(row, start, count, samples, (0, 0) if samples else (0, count)))
            tokens += whole[start:]
        width = max([piece.samples for piece in pieces])
        outputs = runner.forward(pieces, mx.array(tokens, mx.uint32), width)
        mx.eval(outputs.marker, list(outputs.started))
        sampled = iter([] if outputs.logits is None else list(outputs.logits))
        scored = iter(outputs.scored)
        for piece in pieces:
            logits = next(sampled)[: piece.count] if piece.samples else next(scored)
            found.append(np.array(logits.astype(mx.float32)))
    for row in rows:
        row.cache.close(is_finite=True)
    return found


def whole(
    model: Any, widths: Sequence[int] = WIDTHS, texts: Sequence[Sequence[int]] = TEXTS
) -> list[np.ndarray]:
    """What mlx-lm's model gives for each of these parts, by reading all of its tokens."""
    parts = [part for step in schedule(widths, texts) for part in step]
    logits = [model(mx.array([part.tokens]))[0, part.start :] for part in parts]
    return [np.array(each.astype(mx.float32)) for each in logits]


def alike(got: np.ndarray, wanted: np.ndarray) -> bool:
    """But for rounding."""
    assert got.shape == wanted.shape
    return bool(np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max())


@functools.cache
def reference(name: str) -> list[np.ndarray]:
    """`whole` of a model of the families."""
    return whole(build(name))


def runner_on(weights: Any, ops: Any, *, replays: bool = False) -> SlotRunner:
    return SlotRunner(DecoderModel(weights, ops, replays=replays), 2048)


@functools.cache
def build(name: str) -> Any:
    if name in FAMILY:
        return build_model(FAMILY[name])
    return build_packed(MOE if name.startswith("experts") else LLAMA, name.removeprefix("experts, "))


@pytest.mark.parametrize("name", [*FAMILY, *PACKED, *(f"experts, {name}" for name in PACKED)])
def test_logits_are_those_of_mlx_lm(name: str) -> None:
    """Of prompts, of rows in decode beside them, and of verify blocks; and mlx-lm's model still computes them."""
    model, wanted = build(name), reference(name)
    for replays in (False, True):
        runner = runner_on(read_weights(model), PlainOps(), replays=replays)
        assert all(map(alike, steps(runner), wanted))
    assert all(map(alike, whole(model, [1]), wanted))


@pytest.mark.parametrize("replays", [False, True])
def test_hidden_states_of_chosen_layers_are_those_between_them(*, replays: bool) -> None:
    """After no layer, after some and after all: computed or replayed, as mlx-lm's layers hand them on."""
    model = build_model({**LLAMA, "num_hidden_layers": 4})
    wanted = [model.model.embed_tokens(mx.array([TEXTS[0]]))]
    for layer in model.model.layers:
        wanted.append(layer(wanted[-1], "causal"))
    taps = (0, 1, 3, 4)
    decoder = DecoderModel(read_weights(model), PlainOps(), replays=replays, taps=taps)
    count = len(TEXTS[0])
    every = mx.arange(count, dtype=mx.int32)
    piece = PlacedPiece(SlotRunner(decoder, 2048).open(count), 0, count)
    inputs = Inputs(mx.array(TEXTS[0], mx.uint32), every, every)
    passed = decoder.forward(inputs, decoder.mixing.begin([piece], count))
    for tap, states in zip(taps, passed.tapped, strict=True):
        assert alike(np.array(states), np.array(wanted[tap][0]))
    assert alike(np.array(passed.last), np.array(model.model.norm(wanted[-1])[0]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_quantised_latents_give_the_logits_of_mlx_lm(name: str, bits: int) -> None:
    """Where mlx-lm absorbs the up-projections itself, and where it does not."""
    wide = ("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "moe_intermediate_size")
    model = build_packed({**FAMILY[name], **dict.fromkeys(wide, 64)}, f"{bits} bits by 64")
    wanted = whole(model)
    assert all(map(alike, steps(runner_on(read_weights(model), PlainOps())), wanted))


@pytest.mark.parametrize("name", FAMILY)
def test_numpy_gives_the_same(name: str) -> None:
    """Of every family, in float32."""
    model = build(name)
    weights = read_weights(model, in_columns=True)
    assert numpy_ops.supports(weights)
    runner = runner_on(numpy_ops.in_numpy(weights), numpy_ops.NumpyOps())
    assert all(map(alike, steps(runner), reference(name)))


def test_rows_that_outgrow_their_slots_keep_their_tokens() -> None:
    """In the midst of others, by a token, a verify block, and a piece of a prompt."""
    model = build_model(FAMILY["sliding window"])
    texts = [
        [(place * 7 + row) % 300 for place in range(length)] for row, length in enumerate((511, 505, 40, 512))
    ]
    runner = runner_on(read_weights(model), PlainOps())
    assert all(map(alike, steps(runner, (1, 8), texts), whole(model, (1, 8), texts)))
    assert sorted(runner.slots.pools) == [512, 1024]


def test_hidden_states_of_texts_are_their_own() -> None:
    """Of all their tokens, alone or beside a prompt and a row that samples."""
    model = build_model(LLAMA)
    runner = runner_on(read_weights(model), PlainOps())
    rows = rows_of(TEXTS)
    for row in rows:
        row.cache = runner.open(len(row.tokens))
    pieces = [RowPiece(row, 0, len(row.tokens), pooled=True) for row in rows]
    pieces[1] = RowPiece(rows[1], 0, len(TEXTS[1]), samples=1)
    outputs = runner.forward(pieces, mx.array([token for text in TEXTS for token in text], mx.uint32), 1)
    wanted = [model.model(mx.array([text]))[0] for text in TEXTS]
    for got, number in zip(outputs.hidden, (0, 2, 3), strict=True):
        assert alike(np.array(got), np.array(wanted[number]))
    assert outputs.logits is not None
    assert alike(np.array(outputs.logits[0, 0]), np.array(model(mx.array([TEXTS[1]]))[0, -1]))


def test_logits_that_nobody_reads_are_not_computed() -> None:
    """The head is the largest product of a small model: a prompt beside a row in decode takes none."""
    runner = runner_on(read_weights(build_model({**LLAMA, "vocab_size": 50_000})), PlainOps())
    rows = rows_of([[1], [5] * 512])
    for row in rows:
        row.cache = runner.open(len(row.tokens))
    mx.eval(runner.decoder.weights.head)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pieces = [RowPiece(rows[0], 0, 1, samples=1), RowPiece(rows[1], 0, 512)]
    outputs = runner.forward(pieces, mx.array([1] + [5] * 512, mx.uint32), 1)
    mx.eval(outputs.logits, outputs.marker)
    assert mx.get_peak_memory() - before < 512 * 50_000 * 4 / 2


class Counting(PlainOps):
    """Counts rotations, one for each layer that is computed or traced."""

    turns = 0

    def rotate(self, *given: Any) -> Any:
        self.turns += 1
        return super().rotate(*given)


def decode(runner: SlotRunner, count: int) -> tuple[np.ndarray, int]:
    """Logits of a step of so many rows of one token, and the rotations that it took."""
    rows = rows_of([[row + 1] for row in range(count)])
    for row in rows:
        row.cache = runner.open(1)
    ops: Any = runner.decoder.ops
    before = ops.turns
    tokens = mx.array([row + 1 for row in range(count)], mx.uint32)
    outputs = runner.forward([RowPiece(row, 0, 1, samples=1) for row in rows], tokens, 1)
    assert outputs.logits is not None
    logits = np.array(outputs.logits)
    for row in rows:
        row.cache.close(is_finite=True)
    return logits, ops.turns - before


def test_layers_that_are_alike_are_traced_once() -> None:
    """However many there are; and not again for the same number of tokens."""
    weights = read_weights(build_model({**LLAMA, "num_hidden_layers": 6}))
    runner = runner_on(weights, Counting(), replays=True)
    ops: Any = runner.decoder.ops
    runner.decoder.trace([1, 2], float("inf"))
    # Before the first layer, and between two.
    assert ops.turns == 2 * 2
    assert [decode(runner, count)[1] for count in (1, 2, 3, 3)] == [0, 0, 2, 0]
    runner.decoder.trace([9], 0.0)
    assert decode(runner, 9)[1] == 2


def test_the_traces_kept_are_those_last_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on traces beside those made ahead: a dropped trace is freed, and a new one computes the same."""
    monkeypatch.setattr(decoder_module, "_TRACES_MAX", 3)
    runner = runner_on(read_weights(build_model(LLAMA)), Counting(), replays=True)
    runner.decoder.trace([1, 2], float("inf"))
    first, turns = decode(runner, 3)
    assert turns > 0
    assert [decode(runner, count)[1] for count in (4, 5)] == [turns, turns]
    assert [decode(runner, count)[1] for count in (1, 2, 3)] == [0, 0, 0]
    # Room for no more: the trace of 4 tokens was used the longest time ago.
    assert decode(runner, 6)[1] == turns
    assert decode(runner, 3)[1] == 0
    assert decode(runner, 4)[1] == turns
    np.testing.assert_array_equal(decode(runner, 3)[0], first)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MIXTURE, "another architecture"),
        (MAMBA, "another architecture"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DynamicNTKScalingRoPE"),
    ],
)
def test_what_the_decoder_does_not_know_is_left_to_mlx_lm(config: dict[str, Any], reason: str) -> None:
    """With a reason for the log; the model is not changed."""
    model = build_model(config)
    wanted = model(mx.array([[1, 2, 3]]))
    with pytest.raises(Unsupported, match=reason):
        read_weights(model)
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), wanted)


def test_a_layer_with_more_to_it_is_not_of_the_family() -> None:
    """A release of mlx-lm may add parts: they are not passed over."""
    for change in (
        lambda layer: setattr(layer, "gain", mx.ones((1,))),
        lambda layer: setattr(layer.self_attn, "sinks", mx.zeros((4,))),
        lambda layer: setattr(layer.mlp, "more", layer.mlp.down_proj),
    ):
        model = build_model(LLAMA)
        change(model.layers[1])
        with pytest.raises(Unsupported, match="other parts"):
            read_weights(model)


def test_products_of_unlike_weights_stay_apart() -> None:
    """As in checkpoints that keep some layers' values in more bits."""
    model = build_packed({**LLAMA, "tie_word_embeddings": False}, "4 bits by 64")
    other = build_packed({**LLAMA, "tie_word_embeddings": False}, "8 bits by 64")
    model.layers[0].self_attn.v_proj = other.layers[0].self_attn.v_proj
    wanted = whole(model)
    weights: Any = read_weights(model)
    assert [len(layer.inputs) for layer in weights.layers] == [3, 1]
    assert all(map(alike, steps(runner_on(weights, PlainOps())), wanted))


def test_joined_weights_take_no_more_memory() -> None:
    """mlx-lm's modules have views of them."""
    model = build_model({**LLAMA, "hidden_size": 256, "intermediate_size": 1024})
    before = mx.get_active_memory()
    weights: Any = read_weights(model)
    assert mx.get_active_memory() - before < model.layers[0].mlp.gate_proj.weight.nbytes
    assert weights.layers[0].mlp.gate_up[0].weight.nbytes == 2 * model.layers[0].mlp.gate_proj.weight.nbytes
