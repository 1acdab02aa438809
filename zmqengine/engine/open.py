"""From a model's name to an engine: the one call that a worker makes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version

from zmqengine.engine.host.blas import load_tuned_blas
from zmqengine.engine.host.environment import prepare_environment
from zmqengine.engine.options import EngineOptions, Kernels

# Before the first import of MLX, which binds to a BLAS and reads its environment variables.
_BLAS = load_tuned_blas()
_ENVIRONMENT = prepare_environment()

import mlx.core as mx  # noqa: E402

from zmqengine.checkpoint.drafters import read_drafter  # noqa: E402
from zmqengine.engine.adapters.loaded import LoadedAdapters  # noqa: E402
from zmqengine.engine.adapters.lora_files import read_lora  # noqa: E402
from zmqengine.engine.autotune.draws import choose_draw  # noqa: E402
from zmqengine.engine.autotune.saved_choices import SavedChoices  # noqa: E402
from zmqengine.engine.cpu.numpy_ops import NumpyOps  # noqa: E402
from zmqengine.engine.embedding import backend as encoder_backends  # noqa: E402
from zmqengine.engine.host.backend import on_cuda, on_gpu  # noqa: E402
from zmqengine.engine.host.device import Device  # noqa: E402
from zmqengine.engine.host.device_memory import limit_mlx, recommended_bytes  # noqa: E402
from zmqengine.engine.host.host_heap import keep_freed_arrays  # noqa: E402
from zmqengine.engine.load.fingerprint import fingerprint  # noqa: E402
from zmqengine.engine.load.head_tensors import HeadTensors, read_drafter_tensors, read_head_tensors  # noqa: E402
from zmqengine.engine.load.kv_bits import with_kv_bits  # noqa: E402
from zmqengine.engine.load.loader import LoadedModel, Report, find_directory, load  # noqa: E402
from zmqengine.engine.load.open_model import OpenedModel, open_model  # noqa: E402
from zmqengine.engine.load.tokenizer_export import ExportedTokenizer, with_vision, without_vision  # noqa: E402
from zmqengine.engine.metal.metal_ops import MetalOps  # noqa: E402
from zmqengine.engine.models.mlx_lm import mlx_lm_version  # noqa: E402
from zmqengine.engine.models.model_runner import ModelRunner  # noqa: E402
from zmqengine.engine.models.ops import Ops, PlainOps  # noqa: E402
from zmqengine.engine.models.slot_runner import SlotRunner  # noqa: E402
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw, PlainDraw  # noqa: E402
from zmqengine.engine.speculation.build import open_draft_model, open_speculator  # noqa: E402
from zmqengine.engine.speculation.costs import WidthCosts  # noqa: E402
from zmqengine.engine.speculation.draft_model import DraftModel  # noqa: E402
from zmqengine.engine.speculation.head_drafts import HeadDrafts  # noqa: E402
from zmqengine.engine.speculation.source import ModelSource  # noqa: E402
from zmqengine.engine.step.mlx_engine import NO_ADAPTERS, MlxEngine  # noqa: E402
from zmqengine.engine.vision.eye import Eye  # noqa: E402
from zmqengine.engine.vision.opening import open_eye  # noqa: E402
from zmqengine.errors import ConfigError, ModelLoadError  # noqa: E402

log = logging.getLogger("zmqengine.engine")

FEATURES_SHARE = 1 / 16
"""Share of the memory limit for the features of images."""
TOWER_SHARE = 1 / 10
"""Share of the memory limit that the computation of one image may take, beside the tower's weights: that of all
activations."""
# Values of `--speculate` with which a draft model or a drafter is of use.
_DRAFTING = ("auto", "draft")
_DRAWS = {
    "search": "top_p by bisection",
    "sort": "top_p by sorting",
    "kernel": "one kernel for a whole draw",
}


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A loaded engine of `model`, which `runner` runs.

    `memory_limit_bytes`: the limit given to MLX; `facts`: descriptions for people.
    """

    engine: MlxEngine
    model: LoadedModel
    runner: ModelRunner
    tokenizer: ExportedTokenizer
    memory_limit_bytes: int
    facts: dict[str, str]


def open_mlx_engine(
    model: str,
    options: EngineOptions = EngineOptions(),
    *,
    name: str = "",
    limit_memory: Callable[[int, int], int] = lambda recommended_bytes, parameter_bytes: recommended_bytes,
    report: Report = lambda stage, fraction: None,
    wake: Callable[[], None] = lambda: None,
) -> OpenedEngine:
    """Load `model` (a directory or a hub id), to be known as `name`, and build its engine on this thread.

    `limit_memory` is called once, after the weights are loaded, with the system's recommended bytes and the bytes of
    the weights, and returns MLX's memory limit. `wake` is called by another thread when the engine has work. Only this
    thread may use the engine. Raises ModelLoadError.
    """
    recommended = recommended_bytes()
    mx.set_memory_limit(recommended)
    loaded = load(model, report, name=name)
    device, name_of_device = find_device(), device_name()
    if not device.is_gpu:
        keep_freed_arrays()
    facts = {variable.name: f"{variable.value} (set {variable.by})" for variable in _ENVIRONMENT}
    head = _head_tensors(loaded, options)
    # Before the decoder is opened, which joins some of the weights.
    found = None
    if options.cache_path is not None:
        found = fingerprint([loaded.model, None if head is None else head.arrays], loaded.directory)
    draw: Draw = PLAIN_DRAW
    saved = SavedChoices(name_of_device, version("mlx")) if options.warm_up_s else None
    if saved is not None:
        draw, facts["drawing"] = open_draw(loaded.info.vocab_size, saved)
    opened = _open_model(loaded, options, saved, device, head, report)
    facts |= opened.facts
    if options.kv_bits is not None:
        runner, facts["kv_bits"] = with_kv_bits(opened.runner, loaded.info.name, is_gpu=device.is_gpu)
        opened = replace(opened, runner=runner)
    adapters = _open_adapters(opened, options)
    if adapters is not None:
        weights_bytes = loaded.info.parameter_bytes + adapters.bytes
        info = replace(loaded.info, parameter_bytes=weights_bytes, adapters=adapters.digests)
        loaded = replace(loaded, info=info)
    parameter_bytes = loaded.info.parameter_bytes
    eye: Eye | None = None
    if loaded.vision is not None:
        report("reading the vision tower", None)
        eye = open_eye(loaded.directory, loaded.vision, loaded.model, opened.runner, on_gpu=device.is_gpu)
        parameter_bytes += 0 if eye is None else eye.tower.parameter_bytes
    loaded = replace(loaded, info=replace(loaded.info, parameter_bytes=parameter_bytes))
    limit = limit_memory(recommended, loaded.info.parameter_bytes)
    limit_mlx(limit, loaded.info.parameter_bytes)
    loaded, eye, tower_bytes = _fit_eye(loaded, eye, limit)
    draft_model: ModelSource | None = None
    if isinstance(opened.runner, SlotRunner) and opened.runner.head is not None:
        draft_model = HeadDrafts(opened.runner, loaded.info.vocab_size, draw)
    elif options.draft is not None and options.speculate in _DRAFTING:
        draft_model = _open_draft_model(options.draft, options, loaded, draw, report)
    steps = _name_of_steps(loaded, options)
    kept = "" if saved is None else saved.choices.get(steps, "")
    speculator = open_speculator(
        options.speculate,
        loaded.info.vocab_size,
        draft_model,
        by_default=device.drafts_by_default,
        # A CPU is used by other programs.
        costs=WidthCosts.from_text(kept, again=not device.is_gpu),
    )
    _check_pace(options)
    if speculator is not None:
        report("measuring verify blocks", None)
    engine = MlxEngine(
        opened.runner,
        loaded.info,
        options,
        speculator=speculator,
        draw=draw,
        device=device,
        eye=eye,
        images_bytes_max=0 if eye is None else int(limit * FEATURES_SHARE),
        tower_bytes=tower_bytes,
        adapters=adapters,
    )
    if saved is not None and speculator is not None and speculator.has_all_costs:
        saved.keep({steps: speculator.costs.as_text()})
    if options.warm_up_s and device.is_gpu:
        engine.warm_up(options.warm_up_s, lambda fraction: report("warming up", fraction))
    if found is not None:
        engine.keep_on_disk(found, options, wake)
    if not engine.info.batchable:
        log.warning(
            "this model is served row by row: its code cannot step several of its rows in one call",
            extra={"model": engine.info.name},
        )
    facts = {
        **facts,
        "engine": "mlx",
        "model_path": str(loaded.directory),
        "device": name_of_device,
        "mlx": version("mlx"),
        "mlx_lm": mlx_lm_version,
        "blas": _BLAS,
        "batching": "rows together" if engine.info.batchable else "row by row",
    }
    if kernels_found := describe_kernels():
        facts["kernels"] = kernels_found
    if engine.wired.description:
        facts["wired"] = engine.wired.description
    return OpenedEngine(engine, loaded, opened.runner, loaded.tokenizer, limit, facts)


def _open_adapters(opened: OpenedModel, options: EngineOptions) -> LoadedAdapters | None:
    """The adapters in `options`; None where no row can have one of its own. Raises `ModelLoadError`."""
    if isinstance(opened.runner, SlotRunner):
        loras = [read_lora(name, directory) for name, directory in options.adapters.items()]
        return LoadedAdapters(opened.runner, loras)
    if options.adapters:
        raise ModelLoadError(f"--adapter: {NO_ADAPTERS}")
    return None


def _name_of_steps(loaded: LoadedModel, options: EngineOptions) -> str:
    """Name in the saved choices for the cost of steps of such a model."""
    info = loaded.info
    return f"steps of {info.parameter_bytes} bytes, {info.vocab_size} words, up to {options.rows_max} rows"


def _fit_eye(loaded: LoadedModel, eye: Eye | None, limit_bytes: int) -> tuple[LoadedModel, Eye | None, int]:
    """The model with its vision card, for images whose computation fits in memory, and the bytes of that beyond the
    memory of activations. Without a card, where no image fits."""
    if eye is None:
        return loaded, None, 0
    share = int(limit_bytes * TOWER_SHARE)
    parameters = loaded.info.parameter_bytes
    # Small limits: the other half of what weights and activations leave is for KV caches.
    left = max(0, limit_bytes - share - parameters) // 2
    patches_max = eye.largest_patches(share) or eye.largest_patches(left)
    one = eye.tower.peak_bytes(eye.grids(1))
    if not patches_max:
        least = math.ceil(min(one / TOWER_SHARE, (2 * one + parameters) / (1 - TOWER_SHARE)) / (1 << 20))
        reason = f"no image fits in its memory limit: --memory-limit {least}MiB is the least that takes one"
        log.warning("the model sees no images", extra={"reason": reason})
        return replace(loaded, tokenizer=without_vision(loaded.tokenizer, reason)), None, 0
    info = replace(loaded.info, vision=eye.card, image_patches_max=patches_max)
    beyond = max(0, eye.tower.peak_bytes(eye.grids(patches_max)) - share)
    return replace(loaded, info=info, tokenizer=with_vision(loaded.tokenizer, eye.card)), eye, beyond


def find_device() -> Device:
    """Traits of MLX's default device."""
    if on_cuda():
        return Device(is_gpu=True, keeps_buffers=True)
    is_metal = on_gpu()
    return Device(is_gpu=is_metal, rests=is_metal, drafts_by_default=not is_metal)


def find_encoder_backend() -> encoder_backends.Backend:
    """Operations and bounds of encoders for MLX's default device."""
    if on_cuda():
        return encoder_backends.CUDA
    return encoder_backends.METAL if on_gpu() else encoder_backends.CPU


def find_ops(kernels: Kernels = "auto") -> tuple[Ops, Ops]:
    """Operations of a decoder layer for MLX's default device, and the reference operations to compare them with."""
    if kernels == "metal":
        if not mx.metal.is_available():
            raise ConfigError("--kernels is 'metal': there is no Metal on this machine")
        return MetalOps(), PlainOps()
    if on_cuda():
        from zmqengine.engine.cuda.cuda_ops import QUANTISED_ROWS_MAX, CudaOps

        reference = PlainOps(QUANTISED_ROWS_MAX, attention_is_fused=False)
        return (CudaOps() if kernels == "auto" else reference), reference
    ops = PlainOps() if on_gpu() or kernels == "mlx" else NumpyOps()
    return ops, ops


def _head_tensors(loaded: LoadedModel, options: EngineOptions) -> HeadTensors | None:
    """The tensors of a head that drafts: those of the drafter that the operator names, else the model's own. None where
    a model is named, which drafts in its place. Raises `ModelLoadError`."""
    if options.draft is None:
        return read_head_tensors(loaded.directory) if options.speculate == "auto" else None
    if options.speculate not in _DRAFTING:
        return None
    directory = find_directory(options.draft)
    drafter = read_drafter(directory)
    return None if drafter is None else read_drafter_tensors(directory, drafter)


def _open_model(
    loaded: LoadedModel,
    options: EngineOptions,
    saved: SavedChoices | None,
    device: Device,
    head: HeadTensors | None,
    report: Report,
) -> OpenedModel:
    ops, reference = find_ops(options.kernels)
    drafter = None if head is None else head.drafter
    opened = open_model(
        loaded.model,
        ops,
        reference,
        saved,
        head=head,
        context_tokens=loaded.info.context_tokens,
        parameter_bytes=loaded.info.parameter_bytes,
        rows_max=options.rows_max,
        seconds_max=options.warm_up_s,
        replays=device.is_gpu,
        report=report,
    )
    if drafter is not None and not isinstance(opened.runner, SlotRunner):
        code = opened.facts["model_code"]
        raise ModelLoadError(
            f"{drafter.kind} cannot draft for this model, whose code shows nothing of it: {code}"
        )
    return opened


def describe_kernels() -> str:
    """Origins of our kernels that were needed so far, for people; empty without such kernels."""
    if not on_cuda():
        return ""
    from zmqengine.engine.cuda.kernel import kernel_cache

    kept = kernel_cache()
    return "" if kept is None else ", ".join(f"{count} {origin}" for origin, count in kept.counts.items())


def open_draw(vocab_size: int, saved: SavedChoices) -> tuple[Draw, str]:
    """The fastest `Draw` on this device, and its description for people."""
    draws: dict[str, Draw] = {"search": PlainDraw("search"), "sort": PlainDraw("sort")}
    if on_cuda():
        from zmqengine.engine.cuda.draw_kernel import KernelDraw

        draws["kernel"] = KernelDraw()
    name = choose_draw(vocab_size, draws, mx.bfloat16 if on_gpu() else mx.float32, saved)
    return draws[name], _DRAWS[name]


def _open_draft_model(
    draft: str, options: EngineOptions, target: LoadedModel, draw: Draw, report: Report
) -> DraftModel:
    loaded = load(draft, lambda stage, fraction: report(f"{stage} of the draft model", fraction))
    ops, reference = find_ops(options.kernels)
    opened = open_model(
        loaded.model,
        ops,
        reference,
        # A row has columns for draft tokens, too.
        context_tokens=2 * target.info.context_tokens,
        replays=find_device().is_gpu,
    )
    return open_draft_model(loaded, opened.runner, target, draw)


def _check_pace(options: EngineOptions) -> None:
    if not options.prefill_ms and mx.metal.is_available():
        log.warning(
            "--prefill-ms 0 bounds no prefill chunk in time: macOS ends what takes the GPU 5 s, "
            "or less while a display waits for it"
        )


def device_name() -> str:
    """Name of MLX's default device, for people."""
    kind = "gpu" if on_gpu() else "cpu"
    return f"{kind} ({mx.device_info().get('device_name', 'unknown')})"
