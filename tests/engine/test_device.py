"""What is chosen for a device changes how fast a model computes, and not what."""

from __future__ import annotations

import itertools
import math
import time

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from tests.support.models import LLAMA, build_model
from zmqengine.engine import kv
from zmqengine.engine.autotune import attention, plain, projections, quantised, tuning
from zmqengine.engine.autotune import variants as ways
from zmqengine.engine.autotune.remembered import Remembered
from zmqengine.engine.cuda import plain_products
from zmqengine.engine.host import backend, environment
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.sampling import draw

WORDS = 512
OUTPUTS = (64, 896, 4096, 4352, 6144, 8448, 8512, 16_896, 28_672, 256_000)


def make_model(bits: int = 0, *, tied: bool = True):
    mx.random.seed(5)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            rms_norm_eps=1e-5,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            vocab_size=WORDS,
            tie_word_embeddings=tied,
        )
    )
    if bits:
        quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def logits_of(model) -> np.ndarray:
    return np.array(model(mx.array([[1, 2, 3, 4], [9, 8, 7, 6]])))


def test_a_wrong_way_is_not_taken_and_neither_is_one_that_raises():
    """However fast it is."""

    def slow() -> mx.array:
        time.sleep(0.002)
        return mx.ones((4,))

    def broken() -> mx.array:
        raise ValueError("not here")

    bad = {"wrong": lambda: mx.zeros((4,)), "nan": lambda: mx.ones((4,)) * mx.nan, "raises": broken}
    found = ways.fastest({"slow": slow, **bad})
    assert found.best == "slow"
    assert set(found.microseconds) == {"slow"}
    assert ways.fastest({"slow": slow, "fast": lambda: mx.ones((4,))}).best == "fast"


def test_joined_projections_give_the_same_and_keep_nothing():
    """One product for queries, keys and values and one for a gated MLP, whatever the weights are like."""
    for bits in (0, 4):
        model = make_model(bits)
        before = logits_of(model)
        assert projections.join_groups(model) == 4
        assert np.abs(logits_of(model) - before).max() < 1e-4
        attention = model.layers[0].self_attn
        assert attention.k_proj._whole_product._input is None
        assert not projections.groups(model)


def test_layers_that_are_not_alike_stay_apart():
    """What cannot be one product is left as it is."""
    model = make_model()
    model.layers[0].self_attn.k_proj = Linear(128, 64, bias=True)
    assert len(projections.groups(model)) == 3


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_measured_products_give_the_same_and_are_remembered(bits, tmp_path):
    """The model's logits stay within a rounding, and the next start measures nothing."""
    remembered = Remembered("a device", "1.0", tmp_path)
    model = make_model(bits)
    before = logits_of(model)
    choices = tuning.tune(model, remembered, rows_max=4).as_facts()
    assert np.abs(logits_of(model) - before).max() < 1e-4 * np.abs(before).max()
    assert "rows: " in choices["quantised products"]
    again = Remembered("a device", "1.0", tmp_path)
    assert again.choices == remembered.choices
    assert again.choices
    second = make_model(bits)
    started_s = time.perf_counter()
    assert tuning.tune(second, again, rows_max=4).as_facts() == choices
    assert time.perf_counter() - started_s < 30
    assert Remembered("another device", "1.0", tmp_path).choices == {}


def test_plain_products_stay_as_they_are_where_the_kernel_does_not_work():
    """Their logits too; and what is not in half precision is left alone."""
    model = make_model(tied=False)
    assert plain.layers_by_shape(model) == {}
    model.set_dtype(mx.float16)
    before = logits_of(model)
    shapes = plain.layers_by_shape(model)
    assert sum(map(len, shapes.values())) == 2 * 7 + 2
    if not on_cuda():
        chosen = plain.measure(model, until_s=math.inf, known={})
        assert len(chosen) == len(shapes) * len(plain.ROWS)
        assert set(chosen.values()) == {"product"}
    assert plain.measure(model, until_s=0.0, known={}) == {}
    assert type(model.layers[0].self_attn.q_proj) is plain.MeasuredLinear
    assert np.array_equal(logits_of(model), before)
    plain.restore(model)
    assert type(model.layers[0].self_attn.q_proj) is Linear
    assert np.array_equal(logits_of(model), before)


def test_what_is_compared_reaches_the_kernel_of_every_number_of_rows(monkeypatch):
    """A wrong one is found where the model is fitted to the device, also one that was remembered."""
    monkeypatch.setattr(backend, "on_hopper", lambda: True)
    shapes = [logits.shape for logits in tuning._logits(make_model())]
    prompts = [(40, WORDS)] * len(tuning._PROMPTS)
    steps = [(3, WORDS)] * (5 if on_cuda() else 2)
    assert shapes == [*prompts, *steps, *((3 * times, WORDS) for times in (2, 4, 8))]
    for fewer, rows in itertools.pairwise((plain_products.FEW_ROWS_MAX, *plain.ROWS)):
        if rows > plain_products.FEW_ROWS_MAX:
            assert any(fewer < tokens <= rows for tokens in tuning._PROMPTS), rows


def test_every_cut_of_a_product_fits_the_shared_memory_of_a_device():
    """Twice on an H200; compute capability 8.6 has the least since 8.0. There is room for the sums at the end."""
    for rows in range(1, plain_products.FEW_ROWS_MAX + 1):
        for outputs in OUTPUTS:
            cut = plain_products.Cut.of(rows, outputs)
            assert rows <= 8 * cut.tiles
            assert 4 * plain_products._WARPS * 8 * cut.tiles * (cut.columns + 4) <= cut.shared_bytes
            assert cut.shared_bytes <= (99 if rows <= 32 else 113) << 10


def test_every_cut_of_a_wide_product_fits_a_hopper():
    """227 KiB, and parts begin where the tensor cores can find them. No split is without inputs, and a part is on its
    way beside the two that may be multiplied."""
    for rows in range(1, plain.ROWS[-1] + 1):
        for inputs, outputs in itertools.product((64, 128, 896, 4096, 14_336), OUTPUTS):
            for may_cut in (False, True):
                cut = plain_products.WideCut.of(rows, inputs, outputs, may_cut=may_cut)
                assert cut.rows == (40 if rows <= 40 else 80 if rows <= 80 else 160)
                assert cut.shared_bytes <= 227 << 10
                assert (64 * cut.groups + cut.rows) % 8 == 0
                assert 1 <= cut.splits <= inputs // plain_products.PART
                assert cut.stages >= 3


@pytest.mark.parametrize("name", ["product", "side by side", "widened", "copy"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_way_multiplies_alike(name, rows):
    """Also a layer with a bias, and rows that give several tokens."""
    layer = QuantizedLinear.from_linear(Linear(128, 96), 64, 4)
    inputs = mx.random.normal((rows, 2, 128))
    wanted = np.array(layer(inputs))
    quantised._keep_copy(layer)
    layer.__class__ = quantised.MeasuredLinear
    layer.table = ways.WayTable({4: name, 256: name}, quantised.WAYS)
    assert np.abs(np.array(layer(inputs)) - wanted).max() < 1e-4


def test_copies_in_full_width_are_counted_and_bounded():
    """A copy is made only where there is memory for all layers of a shape, and what it takes is told."""
    model = make_model(4)
    assert quantised.copies_bytes(model) == 0
    shape, layers = next(iter(quantised.layers_by_shape(model).items()))
    known = {quantised.name_of(shape, rows): "copy" for rows in quantised.ROWS}
    model = make_model(4)
    quantised.measure(model, on_cuda=False, rows_max=2, copy_bytes_max=1 << 30, known=known)
    copied = quantised.copies_bytes(model)
    assert copied >= 4 * shape[0] * shape[1] * len(layers)
    quantised.restore(model)
    assert quantised.copies_bytes(model) == 0


@pytest.mark.parametrize("method", ["search", "sort"])
def test_top_p_keeps_the_same_words_by_any_method(method):
    """The smallest set with so much weight, in a row whose logits lie far apart and in one of equals."""
    logits = mx.array([[3.0, 1.0, 2.0, -4.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 9.0, 0.0, 0.0, 0.0]])
    scaled = logits - logits.max(axis=-1, keepdims=True)
    floor = {"search": draw._nucleus_floor, "sort": draw._nucleus_floor_sorted}[method]
    kept = scaled >= floor(scaled, mx.exp(scaled), mx.array([[0.8], [0.5], [0.9]]))
    assert np.array(kept)[0].tolist() == [True, False, True, False, False]
    assert np.array(kept)[1].all()
    assert np.array(kept)[2].tolist() == [False, True, False, False, False]


def two_rows(model) -> kv.KVBatch:
    batch = kv.KVBatch.merge([kv.new_caches(model) for _ in range(2)], [0, 0])
    batch.prefill(model, [[1, 2, 3], [4]])
    return batch


def test_only_a_model_that_attends_with_it_is_given_spans(monkeypatch):
    """Another architecture in the same process, a draft model for one, gets masks; and both the same logits."""

    def logits(model) -> list[np.ndarray]:
        batch, inputs = two_rows(model), mx.array([[7], [8]])
        return [np.array(model(inputs, cache=batch.begin_step(inputs))) for _ in range(2)]

    usual, other = make_model(), build_model({**LLAMA, "model_type": "qwen3"})
    before = [logits(usual), logits(other)]
    assert attention.install(usual)
    try:
        assert llama.create_attention_mask is attention.mask_or_spans  # type: ignore[attr-defined]
        for width, kind in ((1, kv.Spans), (99, mx.array)):
            caches = two_rows(usual).begin_step(mx.zeros((2, width)))
            assert isinstance(attention.mask_or_spans(mx.zeros((2, width, 4)), caches[0]), kind)
        if not on_cuda():
            # Without the kernel spans become masks again.
            monkeypatch.setattr(attention, "_fits", lambda *_: False)
        for model, wanted in zip((usual, other), before, strict=True):
            for one, expected in zip(logits(model), wanted, strict=True):
                assert np.abs(one - expected).max() < 1e-3
    finally:
        attention.uninstall(usual)
    assert llama.create_attention_mask is create_attention_mask  # type: ignore[attr-defined]


def test_a_step_without_padding_needs_no_mask():
    """Rows of one length have none; one row that is shorter brings it back, and so does a window."""
    model = make_model()
    caches = [kv.new_caches(model) for _ in range(2)]
    for one, tokens in zip(caches, ([1, 2, 3], [4, 5, 6]), strict=True):
        kv.read_alone(model, one, tokens)
    inputs = mx.array([[7], [8]])
    together = kv.KVBatch.merge(caches, [3, 3]).begin_step(inputs)
    assert together[0].make_mask(1) is None
    assert together[0].make_mask(1, window_size=2) is not None
    model(inputs, cache=together)
    assert together[1].offset is together[0].offset
    assert together[0].offset.tolist() == [4, 4]
    kv.read_alone(model, caches[0], [9])
    unlike = kv.KVBatch.merge(caches, [4, 3]).begin_step(inputs)
    assert unlike[0].make_mask(1).tolist() == [[[[True] * 5]], [[[False] + [True] * 4]]]


def test_variables_of_the_user_stand():
    """What suits a machine is set, unless it was set before; each has a reason and a source."""
    wanted = [
        *environment._metal("Apple M3 Ultra", 96 << 30),
        *environment._cuda(),
    ]
    names = {one.name for one in wanted}
    assert {"MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_CUDA_GRAPH_CACHE_SIZE"} <= names
    assert all(one.why and one.source for one in wanted)
    assert not list(environment._metal("Apple M5 Max", 128 << 30))
    assert [one.name for one in environment._metal("Apple M2", 16 << 30)] == ["MLX_MAX_OPS_PER_BUFFER"]
    assert "MLX_METAL_FAST_SYNCH" not in names
    stands = environment.standing(wanted[:1], {"MLX_MAX_OPS_PER_BUFFER": "7"})
    assert (stands[0].value, stands[0].by) == ("7", "you")
