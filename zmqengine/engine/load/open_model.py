"""Opens the runner of a model: our decoder, tuned and checked against mlx-lm's own code, or that code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from zmqengine.engine.autotune.products import tune_products
from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.cpu import numpy_ops
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.load.head_tensors import HeadTensors
from zmqengine.engine.load.probe import ROWS, probe, rows_of, steps_of
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.attention import WIDTH_MAX
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.draft_head import AnyHead, AnyWeights
from zmqengine.engine.models.families import read_drafter_weights, read_head, read_weights
from zmqengine.engine.models.layers import Experts, Unsupported
from zmqengine.engine.models.mlx_lm_runner import MlxLmRunner
from zmqengine.engine.models.mlx_vlm import VlmText
from zmqengine.engine.models.model_runner import ModelRunner, RowPiece
from zmqengine.engine.models.ops import Ops, PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner, open_head
from zmqengine.engine.models.tree import kind_of, parts_of
from zmqengine.errors import ModelLoadError

log = logging.getLogger("zmqengine.engine")

Report = Callable[[str, "float | None"], None]

# Numbers of tokens that use different kernels, in prompts and in verify blocks: each kernel is compared.
_PROMPTS = (40, 80)
_WIDTHS = (1, 2, 4, WIDTH_MAX, 1)
_PROMPT_LOGITS = 40
# Relative to the size of float32 logits. TF32 rounds each product at 1 part in 2,048; a wrong factor errs by more.
_EXACT_TOLERANCE = 0.01
# Rounding to bfloat16 exchanges the last expert that is chosen of 64 or 128 in 3 to 4 % of the tokens of a layer.
_SHARE_OF_EXPERTS = 0.7
_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True)
class OpenedModel:
    """The runner of a model. `facts`: descriptions for people."""

    runner: ModelRunner
    facts: dict[str, str] = field(default_factory=dict)


def open_model(
    model: Any,
    ops: Ops,
    reference: Ops,
    saved: SavedChoices | None = None,
    *,
    context_tokens: int = _CONTEXT_TOKENS,
    parameter_bytes: int = 0,
    rows_max: int = 32,
    seconds_max: float = 0.0,
    replays: bool = False,
    head: HeadTensors | None = None,
    report: Report = lambda stage, fraction: None,
) -> OpenedModel:
    """Our decoder on `ops` for a model of mlx-lm; mlx-lm's own code where the decoder does not support it or differs.

    Where kernels of `ops` differ, the decoder runs on `reference`, which may be the same object. With `saved` choices,
    products that are not among them are measured, for at most `seconds_max`. `replays`: trace steps, those of up to
    `rows_max` tokens at once. `head`: the tensors of a head that drafts, which is left out where it is not supported.
    """
    until_s = time.perf_counter() + seconds_max
    report("opening the decoder", None)
    if head is not None and not ops.on_mlx:
        # A row carries hidden states for the head, in MLX's arrays.
        ops = reference = PlainOps()
    theirs: MlxLmRunner | Exception
    wanted: Sequence[np.ndarray] = ()
    try:
        # Before some of its weights become views.
        theirs, wanted = probe(model, parameter_bytes)
    except Exception as error:  # noqa: BLE001 - whatever it raises, our decoder may run the model
        theirs = error
    try:
        weights = read_weights(model, in_columns=not ops.on_mlx)
    except Unsupported as error:
        if isinstance(theirs, Exception):
            raise theirs from None
        whose = "mlx-vlm's" if isinstance(model, VlmText) else "mlx-lm's"
        log.info(f"{whose} own code runs this model", extra={"reason": str(error)})
        return OpenedModel(theirs, facts={"model_code": f"{whose}: {error}"})
    is_exact = weights.norm.weight.dtype == mx.float32
    decoder = _decoder(weights, reference)
    ours = SlotRunner(decoder, context_tokens)
    facts = {"model_code": "ours"}
    if isinstance(theirs, Exception):
        log.warning(
            "mlx-lm's own code does not run here; no logits to compare", extra={"reason": str(theirs)[:200]}
        )
        facts["model_code"] = "ours, not compared: mlx-lm's own code does not run here"
    elif not _alike(wanted, lambda: steps_of(ours, together=True), is_exact=is_exact):
        log.warning("the decoder's logits differ from mlx-lm's; mlx-lm's own code runs this model")
        # On CUDA MLX has no gathered product with views of the joined weights of experts.
        model.update(tree_map(mx.contiguous, model.parameters()))
        return OpenedModel(theirs, facts={"model_code": "mlx-lm's: the decoder's logits differ"})
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
    if ops is not reference:
        report("comparing kernels", None)
        if _kernels_agree(weights, ops, reference, replays=replays, is_exact=is_exact):
            decoder = _decoder(weights, ops)
        else:
            log.warning("kernels for this device differ from the reference; MLX's operations run this model")
            facts["model_code"] = "ours, with MLX's operations: kernels for this device differ"
    decoder, draft_head = _with_head(
        model, head, DecoderModel(decoder.weights, decoder.ops, replays=replays), facts
    )
    if replays:
        report("tracing steps", None)
        decoder.trace(sorted({decoder.ops.padded(count) for count in range(1, rows_max + 1)}), until_s)
    log.debug("opened the decoder", extra=facts)
    return OpenedModel(SlotRunner(decoder, context_tokens, draft_head), facts)


def _with_head(
    model: Any, tensors: HeadTensors | None, decoder: DecoderModel, facts: dict[str, str]
) -> tuple[DecoderModel, AnyHead | None]:
    """The decoder with the hidden states that its head takes, and the head that drafts for it, if it has one that is
    supported; says so in `facts`.

    Raises `ModelLoadError` for one that the operator named.
    """
    if tensors is None:
        return decoder, None
    drafter, tapped = tensors.drafter, decoder
    try:
        if drafter is not None and drafter.reader != "head":
            weights: AnyWeights = read_drafter_weights(
                drafter.reader, drafter.config, tensors.arrays, decoder.weights
            )
        else:
            weights = read_head(model, tensors.arrays)
        if weights.taps:
            tapped = DecoderModel(decoder.weights, decoder.ops, replays=decoder.replays, taps=weights.taps)
        head = open_head(weights, tapped)
    except Unsupported as error:
        if drafter is not None:
            raise ModelLoadError(f"{drafter.kind} cannot draft for this model: {error}") from None
        log.warning("the model's own head does not draft", extra={"reason": str(error)})
        facts["draft_head"] = f"not used: {error}"
        return decoder, None
    facts["draft_head"] = "the model's own" if drafter is None else drafter.kind
    return tapped, head


def _decoder(weights: DecoderWeights, ops: Ops, *, replays: bool = False) -> DecoderModel:
    """The decoder on `ops`; on MLX's operations where NumPy does not compute such a model."""
    if ops.on_mlx:
        return DecoderModel(weights, ops, replays=replays)
    if numpy_ops.supports(weights):
        return DecoderModel(numpy_ops.in_numpy(weights), ops)
    return DecoderModel(weights, PlainOps())


def _kernels_agree(
    weights: DecoderWeights, ops: Ops, reference: Ops, *, replays: bool, is_exact: bool
) -> bool:
    """Whether the decoder gives the logits of `reference` on `ops`, too."""
    share = 1.0
    if parts_of(weights.layers, Experts) and not weights.sources:
        # After all layers hardly a token has the same experts: one layer of each kind is compared, in most tokens.
        layers = tuple({kind_of(layer): layer for layer in weights.layers}.values())
        weights, share = weights._replace(layers=layers), _SHARE_OF_EXPERTS
    wanted = _many_logits(_decoder(weights, reference))
    return _alike(
        wanted,
        lambda: _many_logits(_decoder(weights, ops, replays=replays)),
        is_exact=is_exact,
        share=share,
    )


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


def _many_logits(decoder: DecoderModel) -> list[np.ndarray]:
    """Logits of prompts, of verify blocks of all widths, and of a step of both, which use different kernels."""
    runner = SlotRunner(decoder, _CONTEXT_TOKENS)
    logits: list[np.ndarray] = []
    for tokens in _PROMPTS:
        prompt = [1 + index % _PROMPT_LOGITS for index in range(tokens)]
        (row,) = rows_of([prompt])
        row.cache = runner.open(tokens)
        piece = RowPiece(row, 0, tokens, scored=(0, tokens))
        (scored,) = runner.forward([piece], mx.array(prompt, mx.uint32), 1).scored
        logits.append(np.array(scored[:: tokens // _PROMPT_LOGITS].astype(mx.float32)))
        row.cache.close(is_finite=True)
    logits += steps_of(runner, together=True, widths=_WIDTHS)
    logits += _mixed_step(runner)
    return logits


def _mixed_step(runner: SlotRunner) -> list[np.ndarray]:
    """Logits of a step of rows in decode and of a prompt."""
    prompt = [1 + index % _PROMPT_LOGITS for index in range(_PROMPTS[-1])]
    rows = rows_of([*ROWS, prompt])
    pieces = []
    for row in rows:
        row.cache = runner.open(len(row.tokens))
        is_prompt = row is rows[-1]
        if not is_prompt:
            before = RowPiece(row, 0, len(row.tokens) - 1)
            mx.eval(runner.forward([before], mx.array(row.tokens[:-1], mx.uint32), 1).marker)
        start = 0 if is_prompt else len(row.tokens) - 1
        pieces.append(RowPiece(row, start, len(row.tokens) - start, samples=1))
    tokens = [token for piece in pieces for token in piece.row.tokens[piece.start :]]
    outputs = runner.forward(pieces, mx.array(tokens, mx.uint32), 1)
    assert outputs.logits is not None
    return list(np.array(outputs.logits.astype(mx.float32)))
