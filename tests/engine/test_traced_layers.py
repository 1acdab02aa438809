"""Layers that are traced from one attention to the next give what they give otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from tests.support.models import HYBRID, LLAMA, MAMBA, SLIDING, build_model
from zmqengine.engine import kv
from zmqengine.engine.autotune import layers, projections
from zmqengine.engine.autotune.likeness import filled, taken_apart
from zmqengine.engine.interface import ModelInfo, RowRequest
from zmqengine.engine.step.mlx_engine import MlxEngine

QWEN: dict[str, Any] = {**LLAMA, "model_type": "qwen3"}
WORDS = 320


def steps(model: Any, texts: list[list[int]], widths: list[int]) -> list[np.ndarray]:
    """The logits of steps of these widths, for rows that have read `texts`."""
    alone = []
    for text in texts:
        alone.append(kv.new_caches(model))
        kv.read_alone(model, alone[-1], text)
    batch = kv.KVBatch.merge(alone, list(map(len, texts)))
    found = []
    for width in widths:
        inputs = mx.array([[(row * 7 + at) % WORDS for at in range(width)] for row in range(len(texts))])
        logits = model(inputs, cache=batch.begin_step(inputs))
        batch.launch(logits)
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
