"""Layers that are traced from one attention to the next give what they give otherwise."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from tests.support import plain_arithmetic
from tests.support.models import HYBRID, LLAMA, MAMBA, SLIDING, build_model
from zmqengine.engine import kv
from zmqengine.engine.device import attention, layers, projections, tuning
from zmqengine.engine.device.likeness import filled, taken_apart
from zmqengine.engine.interface import ModelInfo, RowRequest
from zmqengine.engine.mlx_engine import MlxEngine

QWEN: dict[str, Any] = {**LLAMA, "model_type": "qwen3"}
WORDS = 320


def steps(model: Any, texts: list[list[int]], widths: list[int]) -> list[np.ndarray]:
    """The logits of steps of these widths, for rows that have read `texts`."""
    alone = []
    for text in texts:
        alone.append(kv.new_caches(model))
        kv.read_alone(model, alone[-1], text)
    caches = kv.merge(alone)
    held = [len(text) for text in texts]
    found = []
    for width in widths:
        kv.make_room(caches, width, held)
        inputs = mx.array([[(row * 7 + at) % WORDS for at in range(width)] for row in range(len(texts))])
        logits = model(inputs, cache=caches)
        held = [length + width for length in held]
        found.append(np.array(logits))
    return found


def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call of a layer's own code from now on."""
    calls: list[Any] = []
    own = llama.Attention.__call__

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        calls.append(self)
        return own(self, *given, **options)

    monkeypatch.setattr(llama.Attention, "__call__", counted)
    return calls


@pytest.mark.parametrize(("config", "traced"), [(LLAMA, 2), (QWEN, 2), (SLIDING, 2), (HYBRID, 2), (MAMBA, 0)])
@pytest.mark.parametrize("texts", [[[1, 2, 3]], [[4, 5], [6, 7, 8, 9, 10], [11]]])
def test_logits_are_the_same(config, traced, texts):
    """In every kind of model, for rows of like and unlike lengths, and windows; and again without it."""
    model = build_model(config)
    widths = [1, 1, 3, 1] if config in (LLAMA, QWEN) else [1, 1]
    before = steps(model, texts, widths)
    assert layers.install(model) == traced
    for got, wanted in zip(steps(model, texts, widths), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-4
    layers.uninstall(model)
    assert not any("_halves" in vars(layer) for layer in model.layers)
    for got, wanted in zip(steps(model, texts, [1]), before, strict=False):
        assert np.array_equal(got, wanted)


def test_a_step_runs_none_of_the_layers_own_code(monkeypatch):
    """Only the first step of a number of rows does, and prompts do."""
    model = build_model(LLAMA)
    projections.join_groups(model)
    layers.install(model)
    calls = attention_calls(monkeypatch)
    before = steps(model, [[1, 2], [3]], [])
    assert not before
    prompts = len(calls)
    assert prompts == 4
    steps(model, [[1, 2], [3]], [1])
    traced = len(calls) - 2 * prompts
    assert traced == 4
    steps(model, [[1, 2], [3]], [1, 1, 1])
    assert len(calls) == 3 * prompts + traced
    layers.trace(model, 3, float("inf"))
    traced = len(calls)
    steps(model, [[1, 2], [3], [4]], [1])
    assert len(calls) == traced + 6


LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FUSABLE: dict[str, Any] = {**LLAMA, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain arithmetic in place of the kernels."""
    plain_arithmetic.stand_in(monkeypatch)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    "config",
    [
        FUSABLE,
        {**FUSABLE, "rope_scaling": LLAMA_3_ROPE},
        {**FUSABLE, "model_type": "qwen3"},
        {**FUSABLE, "model_type": "qwen2", "hidden_size": 64 * LLAMA["num_attention_heads"]},
    ],
)
def test_fused_layers_compute_the_same(config):
    """Of the kinds that are most common: with biases, norms of heads, and frequencies of their own."""
    model = build_model(config)
    texts, widths = [[4, 5], [6, 7, 8, 9, 10], [11]], [1, 1, 3, 1]
    before = steps(model, texts, widths)
    projections.join_groups(model)
    layers.install(model, fuses=True)
    assert layers.count_fused(model) == 3
    for got, wanted in zip(steps(model, texts, widths), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-4
    layers.uninstall(model)
    assert layers.count_fused(model) == 0


@pytest.mark.usefixtures("no_cuda")
def test_a_layer_of_another_kind_is_not_fused():
    """One whose members are others keeps its own code, also between two that are fused."""
    model = build_model({**FUSABLE, "num_hidden_layers": 4})
    projections.join_groups(model)
    model.layers[1].more = RMSNorm(128)
    texts = [[1, 2, 3], [4]]
    before = steps(model, texts, [1, 2])
    layers.install(model, fuses=True)
    assert layers.count_fused(model) == 3
    for got, wanted in zip(steps(model, texts, [1, 2]), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-4
    layers.uninstall(model)
    for other, joins in ((FUSABLE, False), ({**FUSABLE, "rope_traditional": True}, True)):
        model = build_model(other)
        if joins:
            projections.join_groups(model)
        layers.install(model, fuses=True)
        assert layers.count_fused(model) == 0


@pytest.mark.usefixtures("no_cuda")
def test_what_is_written_in_place_is_what_a_cache_would_have(model_in_place):
    """Rows join, leave and go back, and are stepped by any width; only arrays that came out of a write are written to,
    and what was taken of them before stays as it was."""
    model, writes = model_in_place
    wanted = build_model(FUSABLE)
    draw = random.Random(1)
    batches: list[list[Any]] = [[], []]
    held: list[int] = []
    taken: list[tuple[mx.array, np.ndarray]] = []
    for _ in range(60):
        kind = draw.random()
        if not held or (kind < 0.2 and len(held) < 5):
            text = [draw.randrange(WORDS) for _ in range(draw.randrange(1, 40))]
            for place, one in enumerate((model, wanted)):
                alone = kv.new_caches(one)
                kv.read_alone(one, alone, text)
                batches[place] = kv.extend(batches[place], kv.merge([alone]), held)
            held.append(len(text))
        elif kind < 0.3:
            places = sorted(draw.sample(range(len(held)), draw.randrange(1, len(held) + 1)))
            batches = [kv.keep_rows(caches, places, held) for caches in batches]
            held = [held[place] for place in places]
        elif kind < 0.4:
            cache = batches[0][1]
            array = kv.extract([cache], 0, held[0])[0].keys
            taken.append((array, np.array(array)))
        width = draw.choice((1, 1, 2, 5))
        inputs = mx.array([[draw.randrange(WORDS) for _ in range(width)] for _ in held])
        logits = []
        for one, caches in zip((model, wanted), batches, strict=True):
            kv.make_room(caches, width, held)
            logits.append(np.array(one(inputs, cache=caches)))
        assert np.abs(logits[0] - logits[1]).max() < 1e-3
        held = [length + width for length in held]
        if width > 1:
            counts = [draw.randrange(width) for _ in held]
            held = [length - count for length, count in zip(held, counts, strict=True)]
            for caches in batches:
                kv.go_back(caches, counts, held)
    assert all(np.array_equal(np.array(array), before) for array, before in taken)
    assert len(taken) > 2
    assert min(writes.count(True), writes.count(False)) > 30


@pytest.fixture
def model_in_place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose layers write in place where they may, and whether they did, each time."""
    model = build_model(FUSABLE)
    projections.join_groups(model)
    attention.install(model)
    layers.install(model, fuses=True)
    assert layers.count_fused(model) == 3
    writes: list[bool] = []
    own = kv.RaggedKVCache.can_write_here

    def counted(self: Any, *given: Any) -> bool:
        writes.append(own(self, *given))
        return writes[-1]

    monkeypatch.setattr(kv.RaggedKVCache, "can_write_here", counted)
    yield model, writes
    layers.uninstall(model)
    attention.uninstall(model)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("activation", "fused"), [(silu, 3), (gelu, 0)])
def test_a_model_that_says_something_else_is_not_fused(monkeypatch, activation, fused):
    """What a layer's members do not tell is found out by comparing logits."""
    monkeypatch.setattr(llama, "swiglu", lambda gate, up: activation(gate) * up)
    model = build_model(FUSABLE)
    projections.join_groups(model)
    told = tuning._fit_layers(model, 0, float("inf"), fuses=True)
    assert told.startswith("3 traced")
    assert layers.count_fused(model) == fused


def test_layers_that_are_alike_are_traced_once(monkeypatch):
    """However many there are; one that differs in more than its arrays is traced by itself, and computes its own."""
    calls = attention_calls(monkeypatch)
    model = build_model({**LLAMA, "num_hidden_layers": 6})
    projections.join_groups(model)
    texts = [[1, 2, 3], [4]]
    for scale, traced in ((1.0, 4), (3.0, 8)):
        model.layers[2].self_attn.scale *= scale
        before = steps(model, texts, [1, 2])
        layers.install(model)
        calls.clear()
        after = steps(model, texts, [1, 2])
        prompts = len(texts) * len(model.layers)
        assert len(calls) == prompts + 2 * traced
        for got, wanted in zip(after, before, strict=True):
            assert np.abs(got - wanted).max() < 1e-4
        layers.uninstall(model)


def test_what_makes_modules_alike():
    """All but the values of their arrays: types, numbers, names, what they hold, and which of it is the same thing."""

    def made(**options: Any) -> Any:
        model = build_model({**LLAMA, **options})
        return model.layers[0]

    def likeness(layer: Any) -> object:
        return taken_apart(layer)[0]

    wanted = likeness(made())
    assert likeness(made()) == wanted
    assert len({wanted, likeness(made())}) == 1
    assert likeness(made(rms_norm_eps=1e-3)) != wanted
    assert likeness(made(intermediate_size=64)) != wanted
    quantised = made()
    quantize(quantised, group_size=32, bits=4)
    assert likeness(quantised) != wanted
    shared = made()
    shared.input_layernorm = shared.post_attention_layernorm
    assert likeness(shared) != wanted
    other = made()
    other.self_attn.rope.weight = mx.zeros((1,))
    assert likeness(other) != wanted
    seen: list[object] = []
    for act in (lambda x: x, partial(max, 1), partial(max, 2)):
        set_apart = made()
        set_apart.mlp.act = act
        assert likeness(set_apart) not in (wanted, *seen)
        seen.append(likeness(set_apart))


def test_arrays_stand_in_their_slots_for_a_while():
    """Others in the same order, also when what is done with them fails."""
    one, other = (build_model(LLAMA).layers[0] for _ in range(2))
    _, slots = taken_apart(one)
    before = one.self_attn.q_proj.weight
    arrays = [held[name] for held, name in taken_apart(other)[1]]

    def fail() -> None:
        assert one.self_attn.q_proj.weight is other.self_attn.q_proj.weight
        raise ZeroDivisionError

    with filled(slots, arrays), pytest.raises(ZeroDivisionError):
        fail()
    assert one.self_attn.q_proj.weight is before
    with pytest.raises(ZeroDivisionError), filled(slots, arrays):
        fail()
    assert one.self_attn.q_proj.weight is before


def test_what_happens_between_layers_is_not_lost():
    """The next layer takes what was prepared for it only if it is given just that."""

    class Doubling(llama.LlamaModel):
        def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
            h = self.embed_tokens(inputs)
            mask = create_attention_mask(h, cache[0])
            for layer, own in zip(self.layers, cache, strict=True):
                h = layer(h, mask, cache=own) * 2
            return self.norm(h)

    model = build_model(LLAMA)
    model.model.__class__ = Doubling
    before = steps(model, [[1, 2, 3], [4]], [1, 1])
    layers.install(model)
    for got, wanted in zip(steps(model, [[1, 2, 3], [4]], [1, 1]), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-4


def test_layers_that_attend_in_a_way_of_their_own_are_noticed():
    """They raise, and so are left as they are by whoever compares."""

    class Scaled:
        def __init__(self, cache: Any) -> None:
            self.cache, self.offset = cache, cache.offset

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.cache.update_and_fetch(keys, values)
            return keys * 2, values

    class Own(llama.Attention):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return super().__call__(x, mask, Scaled(cache))

    model = build_model(LLAMA)
    for layer in model.layers:
        layer.self_attn.__class__ = Own
    layers.install(model)
    with pytest.raises(TypeError, match="of its own"):
        steps(model, [[1, 2, 3]], [1])


def test_rows_that_come_and_go_get_the_same_tokens():
    """While others join and end, in an engine."""

    def tokens(traced: bool) -> dict[int, list[int]]:
        model = build_model(LLAMA)
        if traced:
            assert layers.install(model)
        info = ModelInfo(
            name="random",
            vocab_size=WORDS,
            context_tokens=512,
            parameter_bytes=1,
            eos_token_ids=frozenset(),
        )
        engine = MlxEngine(model, info)
        waiting = [
            RowRequest(
                row=row, prompt=[1 + (row * 31 + at) % 300 for at in range(3 + 5 * row)], max_tokens=12 - row
            )
            for row in range(7)
        ]
        found: dict[int, list[int]] = {row.row: [] for row in waiting}
        alive = set(found)
        while alive:
            if waiting:
                assert not engine.insert([waiting.pop()])
            for token in engine.next().tokens:
                found[token.row].append(token.token)
                if token.finish is not None:
                    alive.remove(token.row)
        engine.close()
        return found

    assert tokens(traced=True) == tokens(traced=False)
