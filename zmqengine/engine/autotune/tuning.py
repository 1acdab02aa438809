"""Fits a model that has just been loaded to the device it runs on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import QuantizedLinear

from zmqengine.engine import kv
from zmqengine.engine.autotune import attention, layers, plain, projections, quantised
from zmqengine.engine.autotune.choices import Choices
from zmqengine.engine.autotune.remembered import Remembered
from zmqengine.engine.autotune.variants import fastest, in_words
from zmqengine.engine.host import backend
from zmqengine.engine.host.rounding import differ_by_rounding

log = logging.getLogger("zmqengine.engine")

Report = Callable[[str, "float | None"], None]

_ROWS = [[1, 2, 3, 4, 5], [3, 2], [5, 1, 4]]
# What is compared: for each kernel that multiplies other numbers of rows a prompt of so many tokens.
_PROMPTS = (40, 80, 160, 240)


def tune(
    model: Any,
    remembered: Remembered,
    *,
    rows_max: int = 32,
    copy_bytes_max: int = 0,
    seconds_max: float = 60.0,
    report: Report = lambda stage, fraction: None,
) -> Choices:
    """Change `model` in place where the device has something faster; says what was chosen.

    Whatever is changed gives the same logits but for rounding: each change is compared with the model before it, and
    undone where it is not so. Measuring takes `seconds_max` at most, and less at every later start.
    """
    choices = Choices()
    until_s = time.perf_counter() + seconds_max
    on_gpu, on_cuda = backend.on_gpu(), backend.on_cuda()
    report("fitting the model to the device", 0.0)
    if on_cuda:
        quantised.begin(model)
        choices.note("attention", _fit_attention(model))
    if on_gpu:
        choices.note("projections", _fit_projections(model, on_cuda, remembered))
    _fit_products(model, choices, remembered, on_cuda, rows_max, copy_bytes_max, until_s, report)
    if on_cuda:
        _fit_plain_products(model, choices, remembered, until_s, report)
    choices.note("layers", _fit_layers(model, rows_max if on_gpu else 0, until_s, fuses=on_cuda))
    log.info("fitted to the device", extra=choices.as_facts())
    return choices


def _fit_attention(model: Any) -> str:
    before = _logits(model)
    if not attention.install(model):
        return "MLX's, with masks: this model attends in a way of its own"
    if _same(before, _try(model)):
        return "one kernel for rows of unlike lengths, no mask"
    attention.uninstall(model)
    return "MLX's, with masks: the kernel for rows of unlike lengths does not suit this model"


def _fit_projections(model: Any, on_cuda: bool, remembered: Remembered) -> str:
    found = projections.groups(model)
    if not found:
        return "apart: this model has none that read the same"
    module, names = found[0]
    layers = [module[name] for name in names]
    name = f"projections {[tuple(layer.weight.shape) for layer in layers]} {layers[0].weight.dtype}"
    best = remembered.choices.get(name)
    if best is None:
        joined: Any = projections.join(layers)
        dim = joined.weight.shape[1] * (32 // joined.bits if isinstance(joined, QuantizedLinear) else 1)
        dtype = joined.scales.dtype if isinstance(joined, QuantizedLinear) else joined.weight.dtype
        inputs = mx.random.normal((8, 1, dim)).astype(dtype)
        mx.eval(inputs)
        # On CUDA with quantised weights MLX's own product would be timed, which is not what will be used.
        best = "together" if on_cuda else fastest(
            {
                "apart": lambda: mx.concatenate([layer(inputs) for layer in layers], axis=-1),
                "together": lambda: joined(inputs),
            }
        ).best  # fmt: skip
        remembered.keep({name: best})
        del joined
    if best != "together":
        return "apart"
    before = _logits(model)
    undo = [(part, key, part[key]) for part, keys in found for key in keys]
    count = projections.join_groups(model)
    if _same(before, _try(model)):
        del undo
        mx.clear_cache()
        return f"{count} products of {sum(len(keys) for _, keys in found)}"
    for part, key, layer in undo:
        setattr(part, key, layer)
    return "apart: joined they do not suit this model"


def _fit_products(
    model: Any,
    choices: Choices,
    remembered: Remembered,
    on_cuda: bool,
    rows_max: int,
    copy_bytes_max: int,
    until_s: float,
    report: Report,
) -> None:
    if not quantised.layers_by_shape(model):
        return

    def measure() -> dict[str, str]:
        return quantised.measure(
            model,
            on_cuda=on_cuda,
            rows_max=rows_max,
            copy_bytes_max=copy_bytes_max,
            until_s=until_s,
            known=remembered.choices,
            report=lambda fraction: report("measuring products with quantised weights", fraction),
        )

    told = _fit_ways(model, measure, quantised.restore, remembered)
    choices.note("quantised products", "MLX's: others do not suit this model" if told is None else told)
    if copied := quantised.copies_bytes(model):
        choices.note("copies in full width", f"{copied >> 20} MiB")


def _fit_plain_products(
    model: Any, choices: Choices, remembered: Remembered, until_s: float, report: Report
) -> None:
    if not plain.layers_by_shape(model):
        return

    def measure() -> dict[str, str]:
        return plain.measure(
            model,
            until_s=until_s,
            known=remembered.choices,
            report=lambda fraction: report("measuring products", fraction),
        )

    told = _fit_ways(model, measure, plain.restore, remembered)
    choices.note("products", "MLX's: kernels do not suit this model" if told is None else told)


def _fit_ways(
    model: Any, measure: Callable[[], dict[str, str]], restore: Callable[[Any], None], remembered: Remembered
) -> str | None:
    """Have layers take their faster ways; in words, or None if `model` says something else with them and does not take
    them."""
    before = _logits(model)
    chosen = measure()
    if not _same(before, _try(model)):
        restore(model)
        return None
    remembered.keep(chosen)
    return in_words(chosen)


def _fit_layers(model: Any, rows_traced: int, until_s: float, *, fuses: bool) -> str:
    before = _logits(model)
    for fuses_now in (True, False) if fuses else (False,):
        count = layers.install(model, fuses=fuses_now)
        if not count:
            return "as they are: this model's are of another kind"
        if _same(before, _try(model)):
            layers.trace(model, rows_traced, until_s)
            fewer = f", {layers.count_fused(model)} with fewer kernels" if fuses_now else ""
            return f"{count} traced from one attention to the next{fewer}"
        layers.uninstall(model)
    return "as they are: traced they do not suit this model"


def _try(model: Any) -> list[np.ndarray] | None:
    try:
        return _logits(model)
    except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be used
        log.info("a change for the device does not work", extra={"reason": str(error)[:200]})
        return None


def _logits(model: Any) -> list[np.ndarray]:
    """Logits of a prompt, and of a step of rows of unlike lengths: what all changes have to leave as it is."""
    starts = []
    for row in _ROWS:
        caches = kv.new_caches(model)
        kv.read_alone(model, caches, row[:-1])
        starts.append(caches)
    found = [
        _logits_of_prompt(model, tokens) for tokens in (_PROMPTS if backend.on_hopper() else _PROMPTS[:1])
    ]
    prompts = len(found)
    if kv.can_merge(starts[0]):
        lengths = [len(row) - 1 for row in _ROWS]
        merged = kv.KVBatch.merge(starts, lengths)
        try:
            for width in (1, *_widths()) if merged.can_roll_back else (1,):
                found.append(_logits_of_step(model, merged, _ROWS, width))
                mx.eval(found)
            if merged.can_roll_back:
                for times in _times():
                    more = kv.KVBatch.merge(starts * times, lengths * times)
                    found.append(_logits_of_step(model, more, _ROWS * times, layers.WIDTH_MAX))
                mx.eval(found)
        except Exception:  # noqa: BLE001 - some models cannot do this at all, which is found out elsewhere
            del found[prompts:]
    mx.eval(found)
    return [np.array(logits.astype(mx.float32)) for logits in found]


def _widths() -> Sequence[int]:
    """Of steps of several tokens a row, for each kernel that takes so many; the last one is in place again."""
    return (2, 4, layers.WIDTH_MAX, 1) if backend.on_cuda() else (2,)


def _times() -> Sequence[int]:
    """The same for more rows: so many times those that there are."""
    return (2, 4, 8) if backend.on_hopper() else ()


def _logits_of_step(model: Any, batch: kv.KVBatch, rows: Sequence[list[int]], width: int) -> mx.array:
    """Of a step that reads the last token of each row so many times: [rows, vocab]."""
    inputs = mx.array([row[-1:] * width for row in rows], dtype=mx.uint32)
    logits: mx.array = model(inputs, cache=batch.begin_step(inputs))[:, -1]
    return logits


def _logits_of_prompt(model: Any, tokens: int) -> mx.array:
    """Of as many of its tokens as the shortest prompt has: [tokens, vocab]."""
    prompt = [1 + place % _PROMPTS[0] for place in range(tokens)]
    logits: mx.array = model(mx.array([prompt], dtype=mx.uint32), cache=kv.new_caches(model))[0]
    return logits[:: tokens // _PROMPTS[0]]


def _same(before: list[np.ndarray], after: list[np.ndarray] | None) -> bool:
    if after is None or len(before) != len(after):
        return False
    return all(map(differ_by_rounding, before, after))
