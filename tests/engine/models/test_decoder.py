"""The decoder computes what mlx-lm's models compute, over the configurations of its family."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.engine.models.families import FAMILY, MOE, PACKED, build_packed
from tests.support.models import HYBRID, LLAMA, MIXTURE, SLIDING, VOCAB_SIZE, build_model
from zmqengine.engine import kv
from zmqengine.engine.models.decoder import _SHAPES_MAX, WIDTH_MAX, DecoderModel
from zmqengine.engine.models.decoder_weights import NotOfTheFamily, read_weights
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.segment import Segment

# Arithmetic is in float32: another order of the same sums.
TOLERANCE = 1e-4
TEXTS = [list(range(5, 60)), [3, 1, 4, 1, 5], [9, 2, 6, *range(100, 140)], [7]]


def alike(got: mx.array, wanted: mx.array) -> bool:
    """But for rounding."""
    assert got.shape == wanted.shape
    largest = np.abs(np.array(wanted)).max()
    return bool(np.abs(np.array(got) - np.array(wanted)).max() <= TOLERANCE * largest)


def steps(model: Any, widths: list[int], texts: list[list[int]] = TEXTS) -> list[mx.array]:
    """Logits of prompts, each alone, and of steps of all rows together; after each of several tokens rows roll back."""
    found, alone = [], []
    for text in texts:
        alone.append(kv.new_caches(model))
        found.append(kv.prefill_row(model, alone[-1], text))
    batch = kv.KVBatch.merge(alone, list(map(len, texts)))
    rows = range(len(texts))
    for turn, width in enumerate(widths):
        inputs = mx.array([[(row * 37 + at * 11 + turn) % VOCAB_SIZE for at in range(width)] for row in rows])
        logits = model(inputs, cache=batch.begin_step(inputs))
        batch.launch(logits)
        found.append(logits)
        if width > 1 and batch.can_roll_back:
            batch.roll_back([row % width for row in rows])
    mx.eval(found)
    return found


@pytest.mark.parametrize("name", [*FAMILY, *PACKED, *(f"experts, {name}" for name in PACKED)])
def test_logits_are_those_of_mlx_lm(name: str) -> None:
    """Of prompts, of steps of rows of unlike lengths, and of verify blocks; and mlx-lm's model still computes them."""
    if name in FAMILY:
        model = build_model(FAMILY[name])
    else:
        model = build_packed(MOE if name.startswith("experts") else LLAMA, name.removeprefix("experts, "))
    widths = [1, 1, 3, 1, WIDTH_MAX + 2, 1] if name != "sliding window" else [1, 1, 1]
    wanted = steps(model, widths)
    decoder = DecoderModel(read_weights(model), PlainOps())
    for got, expected in zip(steps(decoder, widths), wanted, strict=True):
        assert alike(got, expected)
    for got, expected in zip(steps(model, [1]), wanted, strict=False):
        assert alike(got, expected)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "sliding window", "experts"])
def test_a_packed_step_gives_each_segment_its_own_logits(name: str, multiple: int) -> None:
    """Rows in decode, a chunk of a prompt and another prompt in one call, as in calls of their own."""

    class Padding(PlainOps):
        traces_packed = multiple > 1

        def padded(self, tokens: int) -> int:
            return -(-tokens // multiple) * multiple

    model, ops = build_model(FAMILY[name]), Padding()
    decoder = DecoderModel(read_weights(model), ops)
    # A prompt alone is padded as well.
    assert alike(decoder(mx.array([list(range(20))])), model(mx.array([list(range(20))])))

    def segments() -> list[Segment]:
        alone = [kv.new_caches(decoder) for _ in range(4)]
        for caches, text in zip(alone, TEXTS[:3], strict=False):
            mx.eval(kv.prefill_row(decoder, caches, text))
        batch = kv.KVBatch.merge(alone[:2], list(map(len, TEXTS[:2])))
        rows = mx.array([[8], [9]])
        return [
            Segment(rows, batch.begin_step(rows)),
            Segment(kv.begin_row_prefill(alone[2], list(range(50, 70))), alone[2]),
            Segment(kv.begin_row_prefill(alone[3], [4, 5, 6]), alone[3]),
        ]

    apart, together = segments(), segments()
    wanted = [model(segment.inputs, cache=segment.caches) for segment in apart]
    for turn in range(2):
        for got, expected in zip(decoder.packed(together), wanted, strict=True):
            assert alike(got, expected)
        if turn:
            break
        apart, together = (
            [segment._replace(inputs=segment.inputs[:, :1]) for segment in some[1:]]
            for some in (apart, together)
        )
        wanted = [model(segment.inputs, cache=segment.caches) for segment in apart]


@pytest.mark.parametrize("beside", [False, True])
def test_texts_side_by_side_attend_to_their_own_tokens(beside: bool) -> None:
    """Whatever the place of a text: alone in a step or beside a prompt, each has its own hidden states."""
    decoder = DecoderModel(read_weights(build_model(LLAMA)), PlainOps())
    lengths = [len(text) for text in TEXTS]
    caches = kv.new_caches(decoder)
    inputs = kv.begin_row_prefill(caches, [token for text in TEXTS for token in text])
    prompt = Segment(mx.array([[4, 5, 6]]), kv.new_caches(decoder))
    segments = [Segment(inputs, caches, reads=True, lengths=lengths), *[prompt] * beside]
    (got,) = decoder.packed(segments)[:1]
    wanted = mx.concatenate([decoder.hidden(mx.array([text])) for text in TEXTS], axis=1)
    assert alike(got, wanted)


def test_logits_that_nobody_reads_are_not_computed() -> None:
    """The head is the largest product of a small model: a prompt in a packed step takes none."""
    decoder = DecoderModel(read_weights(build_model({**LLAMA, "vocab_size": 50_000})), PlainOps())
    caches = [kv.new_caches(decoder) for _ in range(2)]
    inputs = [mx.array([[1]]), mx.array([[5] * 512])]
    mx.eval(decoder.weights.head)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(decoder.packed(list(map(Segment, inputs, caches)))[0], kv.arrays(caches[1]))
    assert mx.get_peak_memory() - before < 512 * 50_000 * 4 / 2


def test_layers_that_are_alike_are_traced_once() -> None:
    """However many there are; and not again for the same numbers of rows."""
    decoder = DecoderModel(read_weights(build_model({**LLAMA, "num_hidden_layers": 6})), Counting())
    ops: Any = decoder.ops
    decoder.trace_steps(2, float("inf"))
    # Before the first layer, between two, and behind the last.
    assert ops.turns == 2 * 2
    inputs = mx.array([[1], [2]], dtype=mx.uint32)
    caches = kv.KVBatch.merge([kv.new_caches(decoder) for _ in range(2)], [0, 0])
    decoder(inputs, cache=caches.begin_step(inputs))
    assert ops.turns == 2 * 2
    decoder.trace_steps(9, 0.0)
    assert ops.turns == 2 * 2
    decoder(mx.array([[1, 2, 3]]))
    assert ops.turns == 2 * 2 + 6


def test_the_traces_kept_are_those_last_in_use() -> None:
    """A bound on traces beside those made ahead: a dropped trace is freed, and a new one computes the same."""
    ops = Counting()
    decoder = DecoderModel(read_weights(build_model(LLAMA)), ops)
    decoder.trace_steps(2, float("inf"))
    layers = len(decoder.layers)

    def step(rows: int) -> tuple[mx.array, int]:
        inputs = mx.array([[row] for row in range(rows)], dtype=mx.uint32)
        caches = kv.KVBatch.merge([kv.new_caches(decoder) for _ in range(rows)], [0] * rows)
        before = ops.turns
        logits = decoder(inputs, cache=caches.begin_step(inputs))
        mx.eval(logits)
        return logits, ops.turns - before

    first, _ = step(3)
    for rows in range(4, 3 + _SHAPES_MAX):
        step(rows)
    assert (step(1)[1], step(2)[1], step(3)[1]) == (0, 0, 0)
    # Room for one more: the shapes of 4 rows were used the longest time ago.
    step(3 + _SHAPES_MAX)
    assert step(3)[1] == 0
    assert step(4)[1] == layers
    again, _ = step(3)
    assert mx.array_equal(first, again)
    assert len(decoder._traces.calls) == _SHAPES_MAX + 2


class Counting(PlainOps):
    """Counts rotations, one for each layer that is computed or traced."""

    turns = 0

    def rotate(self, *given: Any) -> Any:
        self.turns += 1
        return super().rotate(*given)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MIXTURE, "another architecture"),
        (HYBRID, "another architecture"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DynamicNTKScalingRoPE"),
    ],
)
def test_what_the_decoder_does_not_know_is_left_to_mlx_lm(config: dict[str, Any], reason: str) -> None:
    """With a reason for the log; the model is not changed."""
    model = build_model(config)
    wanted = model(mx.array([[1, 2, 3]]))
    with pytest.raises(NotOfTheFamily, match=reason):
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
        with pytest.raises(NotOfTheFamily, match="other parts"):
            read_weights(model)


def test_products_of_unlike_weights_stay_apart() -> None:
    """As in checkpoints that keep some layers' values in more bits."""
    model = build_packed({**LLAMA, "tie_word_embeddings": False}, "4 bits by 64")
    other = build_packed({**LLAMA, "tie_word_embeddings": False}, "8 bits by 64")
    model.layers[0].self_attn.v_proj = other.layers[0].self_attn.v_proj
    wanted = steps(model, [1, 2])
    weights = read_weights(model)
    assert [len(layer.qkv) for layer in weights.layers] == [3, 1]
    for got, expected in zip(steps(DecoderModel(weights, PlainOps()), [1, 2]), wanted, strict=True):
        assert alike(got, expected)


def test_joined_weights_take_no_more_memory() -> None:
    """mlx-lm's modules have views of them."""
    model = build_model({**LLAMA, "hidden_size": 256, "intermediate_size": 1024})
    before = mx.get_active_memory()
    weights = read_weights(model)
    assert mx.get_active_memory() - before < model.layers[0].mlp.gate_proj.weight.nbytes
    assert weights.layers[0].mlp.gate_up[0].weight.nbytes == 2 * model.layers[0].mlp.gate_proj.weight.nbytes


def test_windows_and_whole_texts_have_caches_of_their_kind() -> None:
    """Those that mlx-lm would make."""
    model = build_model(SLIDING)
    decoder = DecoderModel(read_weights(model), PlainOps())
    made = [(type(cache), getattr(cache, "max_size", None)) for cache in decoder.make_cache()]
    assert made == [(type(cache), getattr(cache, "max_size", None)) for cache in make_prompt_cache(model)]
