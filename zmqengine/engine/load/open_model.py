"""Opens the decoder for a model that mlx-lm has loaded, tunes it, and checks it against mlx-lm's own code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.autotune.products import tune_products
from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.models.decoder import WIDTH_MAX, DecoderModel
from zmqengine.engine.models.decoder_weights import Experts, NotOfTheFamily, read_weights
from zmqengine.engine.models.ops import Ops
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.models.tree import kind_of

log = logging.getLogger("zmqengine.engine")

Report = Callable[[str, "float | None"], None]

# Rows of unlike lengths: prefills of at most 7 tokens, and steps of 3 rows. For more tokens MLX compiles its quantised
# product on CUDA, which takes up to half a minute.
_ROWS = [[1, 2, 3, 4, 5], [3, 2], [5, 1, 4]]
# Numbers of tokens that use different kernels, in prompts and in verify blocks: each kernel is compared.
_PROMPTS = (40, 80)
_WIDTHS = (2, 4, WIDTH_MAX, 1)
_PROMPT_LOGITS = 40
# Relative to the size of float32 logits. TF32 rounds each product at 1 part in 2,048; a wrong factor errs by more.
_EXACT_TOLERANCE = 0.01
# Rounding to bfloat16 exchanges the last expert that is chosen of 64 or 128 in 3 to 4 % of the tokens of a layer.
_SHARE_OF_EXPERTS = 0.7


@dataclass(frozen=True)
class OpenedModel:
    """The model to run: the decoder, or mlx-lm's own code. `facts`: descriptions for people."""

    model: Any
    facts: dict[str, str] = field(default_factory=dict)


def open_model(
    model: Any,
    ops: Ops,
    reference: Ops,
    saved: SavedChoices | None = None,
    *,
    rows_max: int = 32,
    seconds_max: float = 0.0,
    traces: bool = False,
    report: Report = lambda stage, fraction: None,
) -> OpenedModel:
    """The decoder on `ops` for a model of mlx-lm; the model itself where the decoder does not support it or differs.

    Where kernels of `ops` differ, the decoder runs on `reference`, which may be the same object. With `saved` choices,
    products that are not among them are measured, for at most `seconds_max`. `traces`: trace steps of up to `rows_max`
    rows.
    """
    until_s = time.perf_counter() + seconds_max
    report("opening the decoder", None)
    try:
        weights = read_weights(model, in_columns=ops.in_columns)
    except NotOfTheFamily as error:
        log.info("mlx-lm's own code runs this model", extra={"reason": str(error)})
        return OpenedModel(model, facts={"model_code": f"mlx-lm's: {error}"})
    decoder = DecoderModel(weights, reference)
    is_exact = weights.norm.weight.dtype == mx.float32
    if not _alike(_logits(model), lambda: _logits(decoder), is_exact=is_exact):
        log.warning("the decoder's logits differ from mlx-lm's; mlx-lm's own code runs this model")
        return OpenedModel(model, facts={"model_code": "mlx-lm's: the decoder's logits differ"})
    facts = {"model_code": "ours"}
    if saved is not None:
        choices = tune_products(
            weights,
            ops,
            saved,
            rows_max=rows_max,
            until_s=until_s,
            report=lambda fraction: report("measuring products", fraction),
        )
        if choices:
            facts["products"] = choices
    if ops is reference:
        decoder = DecoderModel(weights, ops)
    else:
        report("comparing kernels", None)
        decoder, facts["model_code"] = _on_kernels(decoder, ops, is_exact=is_exact)
    if traces:
        report("tracing steps", None)
        decoder.trace_steps(rows_max, until_s)
    log.debug("opened the decoder", extra=facts)
    return OpenedModel(decoder, facts)


def _on_kernels(decoder: DecoderModel, ops: Ops, *, is_exact: bool) -> tuple[DecoderModel, str]:
    """The fastest decoder on `ops` whose logits agree with those of `decoder`, else that one; and its description."""
    weights, reference, share = decoder.weights, decoder, 1.0
    if any(isinstance(layer.mlp, Experts) for layer in weights.layers):
        # After all layers hardly a token has the same experts: one layer of each kind is compared, in most tokens.
        layers = tuple({kind_of(layer): layer for layer in weights.layers}.values())
        weights, share = weights._replace(layers=layers), _SHARE_OF_EXPERTS
        reference = DecoderModel(weights, decoder.ops)
    wanted = _many_logits(reference)

    def agrees(*, traces_attention: bool) -> bool:
        tried = DecoderModel(weights, ops, traces_attention=traces_attention)
        return _alike(wanted, lambda: _many_logits(tried), is_exact=is_exact, share=share)

    tuned = DecoderModel(decoder.weights, ops)
    if agrees(traces_attention=True):
        return tuned, "ours"
    if tuned.traced_attention is not None and agrees(traces_attention=False):
        log.warning("traced attention differs from the reference; it is called apart in every layer")
        apart = DecoderModel(decoder.weights, ops, traces_attention=False)
        return apart, "ours, with attention apart: traced it differs"
    log.warning("kernels for this device differ from the reference; MLX's operations run this model")
    return decoder, "ours, with MLX's operations: kernels for this device differ"


def _alike(
    wanted: Sequence[np.ndarray],
    compute: Callable[[], Sequence[np.ndarray]],
    *,
    is_exact: bool,
    share: float = 1.0,
) -> bool:
    """Whether logits differ by rounding only, in this share of all rows. `is_exact` (a float32 model) adds a sharper
    bound."""
    try:
        got = compute()
    except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be used
        log.warning("the decoder fails", extra={"reason": str(error)[:200]})
        return False
    if [logits.shape for logits in got] != [logits.shape for logits in wanted]:
        return False
    if share < 1:
        wanted, got = [np.concatenate(wanted)], [np.concatenate(got)]
    if not all(differ_by_rounding(one, other, share) for one, other in zip(wanted, got, strict=True)):
        return False
    return not is_exact or all(map(_nearly_equal, wanted, got))


def _nearly_equal(wanted: np.ndarray, got: np.ndarray) -> bool:
    return bool(np.linalg.norm(got - wanted) <= _EXACT_TOLERANCE * np.linalg.norm(wanted))


def _logits(model: Any) -> list[np.ndarray]:
    """Logits of short prompts and of steps of their rows in a batch; also of a verify block where rows can roll
    back."""
    found, starts = [], []
    for row in _ROWS:
        starts.append(kv.new_caches(model))
        found.append(kv.prefill_row(model, starts[-1], row[:-1])[0])
    if kv.can_merge(starts[0]):
        batch = kv.KVBatch.merge(starts, [len(row) - 1 for row in _ROWS])
        for width in (1, 2) if batch.can_roll_back else (1,):
            found.append(_step(model, batch, _ROWS, width))
    return _as_numpy(found)


def _many_logits(model: Any) -> list[np.ndarray]:
    """Logits of prompts and verify blocks of all sizes that use different kernels."""
    found = []
    for tokens in _PROMPTS:
        logits = kv.prefill_row(model, kv.new_caches(model), _prompt(tokens))[0]
        found.append(logits[:: tokens // _PROMPT_LOGITS])
    starts = []
    for row in _ROWS:
        starts.append(kv.new_caches(model))
        mx.eval(kv.prefill_row(model, starts[-1], row[:-1]))
    lengths = [len(row) - 1 for row in _ROWS]
    batch = kv.KVBatch.merge(starts, lengths)
    widths = _WIDTHS if batch.can_roll_back else (1, 1)
    # The first step of a batch is not written in place.
    for width in (1, *widths):
        found.append(_step(model, batch, _ROWS, width))
        mx.eval(found)
        if width == WIDTH_MAX:
            # The steps after it have gaps.
            batch.roll_back([row * width // len(_ROWS) for row in range(len(_ROWS))])
    found += _packed_step(model, batch, _ROWS)
    return _as_numpy(found)


def _prompt(tokens: int) -> list[int]:
    return [1 + index % _PROMPT_LOGITS for index in range(tokens)]


def _step(model: Any, batch: kv.KVBatch, rows: Sequence[Sequence[int]], width: int) -> mx.array:
    """Logits [rows, vocab] of a step of `width` tokens a row, each row's last token repeated."""
    inputs = mx.array([[row[-1]] * width for row in rows], dtype=mx.uint32)
    logits: mx.array = model(inputs, cache=batch.begin_step(inputs))[:, -1]
    batch.launch(logits)
    return logits


def _packed_step(model: Any, batch: kv.KVBatch, rows: Sequence[Sequence[int]]) -> list[mx.array]:
    """Logits [rows, vocab] of a step of a batch and of a prompt in one call."""
    inputs = mx.array([row[-1:] for row in rows], dtype=mx.uint32)
    caches = kv.new_caches(model)
    prompt = kv.begin_row_prefill(caches, _prompt(_PROMPTS[-1]))
    segments = [Segment(inputs, batch.begin_step(inputs)), Segment(prompt, caches)]
    found = [logits[:, -1] for logits in model.packed(segments)]
    batch.launch(found)
    return found


def _as_numpy(found: Sequence[mx.array]) -> list[np.ndarray]:
    mx.eval(found)
    return [np.array(logits.astype(mx.float32)) for logits in found]
