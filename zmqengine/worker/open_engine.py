"""Opens an engine and its tokenizer, and reports the progress."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zmqengine.checkpoint.on_disk import local_directory
from zmqengine.checkpoint.text_config import number_type
from zmqengine.config import WorkerConfig
from zmqengine.engine.adapter_files import read_files
from zmqengine.engine.grammar.matcher import NeverBegins
from zmqengine.engine.host.device_errors import device_error
from zmqengine.engine.host.environment import TF32_VARIABLE, cuda_version
from zmqengine.engine.host.machine_probe import probe_machine
from zmqengine.engine.interface import Engine, RowRequest, TextsRequest, VectorEngine
from zmqengine.engine.load.mlx_kernels import start_children
from zmqengine.errors import ConfigError, ModelLoadError
from zmqengine.pico import BUNDLED, model_path
from zmqengine.protocol.addresses import base_directory
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine.worker.process.memory_pressure import Source, pressure_source
from zmqengine.worker.process.memory_share import MemoryShare
from zmqengine.worker.process.power import Wired

if TYPE_CHECKING:
    from zmqengine.engine.fake.fake_engine import FakeEngine
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

Report = Callable[[str, "float | None"], None]

log = logging.getLogger("zmqengine.worker")

MEASURED_TOKENS = (64, 512)
"""Lengths of prompts prefilled at the start to measure the speed; the longer one where the shorter took little time."""
MEASURED_S = 0.25
"""Seconds of a prefill from which its rate counts: one-time work dominates a shorter one."""
CLAIMS_DIRECTORY = ".memory"
"""Directory beside those of named workers; no worker can have this name."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine with its tokenizer, facts and memory limit.

    `memory_limit_bytes`: the engine's memory limit, weights included.
    """

    engine: Engine | VectorEngine
    tokenizer: TokenizerBundle
    memory_limit_bytes: int
    facts: dict[str, str]
    compiler: ConstraintCompiler | None = None
    memory_share: MemoryShare | None = None
    memory_pressure: Source = lambda: "normal"
    release_buffers: Callable[[], None] = lambda: None
    wired: Wired | None = None

    def close(self) -> None:
        """Free the engine, and withdraw its claim on memory."""
        self.engine.close()
        if self.memory_share is not None:
            self.memory_share.close()


def open_engine(
    config: WorkerConfig, report: Report, wake: Callable[[], None] = lambda: None, *, probe: bool = False
) -> Opened:
    """Build the engine of `config` on this thread. Raises `ConfigError` or `ModelLoadError`.

    `wake` is called by another thread when the engine has work for the next pass. `probe`: first test MLX in a child
    process, since an import of MLX that does not work may end the process.
    """
    if config.engine.startswith("fake:"):
        return _open_fake(config)
    return _open_mlx(config, report, wake, probe=probe)


def after_a_hang(error: ModelLoadError, restarts: int) -> ModelLoadError:
    """The error with advice, if a worker that was started again finds no memory on a Mac; else the same.

    After a hang the driver keeps memory of the process that ended (github.com/jundot/omlx/issues/15).
    """
    fault = None if error.__cause__ is None else device_error(error.__cause__)
    if not restarts or sys.platform != "darwin" or fault is None or fault.name != "out of memory":
        return error
    return ModelLoadError(
        f"{error}; the model may have fitted before: after a hang of the GPU macOS keeps the memory of the process "
        "that ended, and every model finds too little. Restart the Mac"
    )


def warm_up(engine: Engine | VectorEngine) -> None:
    """Take one short row through prefill and decode, and remove it, even if a step raises.

    The row has a mask: the kernel that applies masks may take a second to compile. A model of vectors computes one
    first.
    """
    if engine.info.makes_vectors:
        _warm_up_vectors(engine)
    if not engine.info.generates or not isinstance(engine, Engine):
        return
    prompt = [0] * min(8, engine.info.context_tokens - 2)
    probe = RowRequest(row=-1, prompt=prompt, max_tokens=2, grammar=NeverBegins())
    try:
        for _, message, _ in engine.insert([probe]):
            raise RuntimeError(f"the warm-up request was refused: {message}")
        tokens = 0
        while tokens < 2:
            result = engine.next()
            if result.failures:
                raise RuntimeError(f"the warm-up request failed: {result.failures[0].message}")
            tokens += len(result.tokens)
    finally:
        engine.remove([-1])


def _warm_up_vectors(engine: Engine | VectorEngine) -> None:
    output: Literal["embedding", "score"] = "embedding" if engine.info.dimensions else "score"
    try:
        engine.embed([TextsRequest(row=-1, texts=[[0] * min(8, engine.info.context_tokens)], output=output)])
        while not (result := engine.next()).vectors:
            if result.failures:
                raise RuntimeError(f"the warm-up text failed: {result.failures[0].message}")
    finally:
        engine.remove([-1])


def measure_disk(engine: Engine | VectorEngine) -> None:
    """Measure the speed of prefill, which a restore must beat, where the prefix cache is on disk.

    The prompts of this measurement are removed from the engine.
    """
    if not isinstance(engine, Engine) or engine.disk is None:
        return
    rate = 0.0
    for token, wanted in enumerate(MEASURED_TOKENS):
        tokens = min(wanted, engine.info.context_tokens - 2)
        seconds = _read_seconds(engine, [token] * tokens)
        rate = tokens / seconds
        if seconds > MEASURED_S:
            break
    engine.reset()
    engine.disk.note_prefill(rate)
    log.debug("prompts on disk", extra=engine.disk.description)


def _read_seconds(engine: Engine, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    try:
        engine.insert([RowRequest(row=-1, prompt=prompt, max_tokens=1)])
        while not (result := engine.next()).tokens:
            if result.failures:
                raise RuntimeError(f"a prompt to measure with failed: {result.failures[0].message}")
    finally:
        engine.remove([-1])
    return time.perf_counter() - started_s


def _open_mlx(config: WorkerConfig, report: Report, wake: Callable[[], None], *, probe: bool) -> Opened:
    is_bundled = config.model in BUNDLED
    # Refuse an impossible model name at once: the imports below take seconds.
    local = model_path(config.model) if is_bundled else local_directory(config.model)
    if config.draft in BUNDLED:
        config = replace(config, draft=str(model_path(config.draft)))
    elif config.draft is not None:
        local_directory(config.draft)
    await_kernels = start_children(number_type(local))
    if probe:
        _check_device()
    if config.tf32:
        # Before the engine sets it: MLX reads the variable once, at its first product.
        os.environ.setdefault(TF32_VARIABLE, "1")
    # Imported here: the fake engine must run without MLX.
    from zmqengine.engine.open import find_encoder_backend, open_mlx_engine  # isort: skip - it chooses what MLX binds to
    from zmqengine.checkpoint.recipe import read_recipe
    from zmqengine.engine.embedding.opening import open_encoder, read_texts
    from zmqengine.engine.host.device_memory import release_buffers
    from zmqengine.engine.load.loader import find_directory
    from zmqengine.worker.requests.constraint_compiler import ConstraintCompiler

    if await_kernels is not None:
        report("compiling MLX's kernels", None)
        await_kernels()
    share = _memory_share(config)
    facts: dict[str, str] = {}

    def limit_memory(recommended_bytes: int, weights_bytes: int) -> int:
        if share is None:
            return config.memory_limit_bytes or recommended_bytes
        total_bytes = min(recommended_bytes, config.memory_total_bytes or recommended_bytes)
        view = share.claim(max(weights_bytes, config.memory_least_bytes or 0), total_bytes)
        facts["memory"] = view.description
        log.debug("memory limit", extra=facts)
        if view.is_too_much:
            log.warning(
                "the workers on this machine may together hold more memory than it has: lower --memory-limit",
                extra=facts,
            )
        return view.limit_bytes

    report("finding the model", None)
    directory = model_path(config.model) if is_bundled else find_directory(config.model)
    is_hub_id = not is_bundled and not Path(config.model).expanduser().exists()
    named = config.model_name or (config.model if is_bundled or is_hub_id else "")
    recipe = read_recipe(directory)
    # A CUDA GPU has memory of its own: the system's pressure does not concern it.
    memory_pressure: Source = (lambda: "normal") if cuda_version() else pressure_source()
    if recipe.family:
        encoder = open_encoder(
            directory,
            recipe,
            backend=find_encoder_backend(),
            name=named or directory.name,
            options=config,
            limit_memory=limit_memory,
            report=report,
        )
        return Opened(
            engine=encoder.engine,
            tokenizer=TokenizerBundle(call=0, **asdict(encoder.tokenizer)),
            memory_limit_bytes=encoder.memory_limit_bytes,
            facts={**encoder.facts, **facts},
            memory_share=share,
            memory_pressure=memory_pressure,
            release_buffers=release_buffers,
        )
    opened = open_mlx_engine(
        str(directory), config, name=named, limit_memory=limit_memory, report=report, wake=wake
    )
    compiler = ConstraintCompiler(opened.tokenizer.tokenizer_json, opened.engine.info)
    # On a thread: only the first request with a constraint waits for it.
    threading.Thread(target=compiler.warm_up, name="constraints", daemon=True).start()
    read_texts(opened.engine, opened.runner, recipe)
    return Opened(
        engine=opened.engine,
        tokenizer=TokenizerBundle(call=0, **asdict(opened.tokenizer)),
        memory_limit_bytes=opened.memory_limit_bytes,
        facts={**opened.facts, **facts},
        compiler=compiler,
        memory_share=share,
        memory_pressure=memory_pressure,
        release_buffers=release_buffers,
        wired=opened.engine.wired,
    )


def _check_device() -> None:
    def beside() -> None:
        # mlx-lm imports it, which takes as long as the probe. If it is not there, loading says so. Without torch it
        # prints an advice that mlx-lm turns off.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers").AutoTokenizer  # noqa: B018 - a name that is imported when it is read

    probe = probe_machine(beside=beside)
    if probe.problem and probe.is_certain:
        raise ModelLoadError(probe.problem)
    if probe.problem:
        log.warning(probe.problem)


def _memory_share(config: WorkerConfig) -> MemoryShare | None:
    directory = base_directory() / CLAIMS_DIRECTORY
    try:
        return MemoryShare(directory, config.name, config.memory_limit_bytes)
    except OSError as error:
        log.warning("other workers on this machine are not taken into account", extra={"reason": str(error)})
        return None


def _open_fake(config: WorkerConfig) -> Opened:
    import msgspec

    from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig
    from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE, END, VISION_TEMPLATE, fake_tokenizer_json
    from zmqengine.engine.fake.fake_vector_engine import FakeVectorEngine

    try:
        fake = FakeEngineConfig.from_json(config.engine.removeprefix("fake:") or "{}")
        if config.model_name:
            fake = msgspec.structs.replace(fake, name=config.model_name)
        engine = _fake_with_adapters(FakeEngine(fake), config) if fake.generates else FakeVectorEngine(fake)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the fake engine's configuration is wrong: {error}") from None
    card = engine.info.vision
    if card is not None and engine.info.vocab_size <= max(*card.end, 258):
        raise ConfigError(
            "the fake engine's configuration is wrong: with vision it needs a vocab_size of 260"
        )
    tokenizer_json = fake_tokenizer_json(engine.info.vocab_size, vision=card is not None)
    template = CHAT_TEMPLATE if card is None else VISION_TEMPLATE
    return Opened(
        engine=engine,
        tokenizer=TokenizerBundle(
            call=0,
            hash=hashlib.sha256(tokenizer_json + template.encode()).hexdigest(),
            tokenizer_json=tokenizer_json,
            chat_template=template,
            eos_token_ids=sorted(engine.info.eos_token_ids),
            special_tokens={"eos_token": END},
            vision=card,
        ),
        memory_limit_bytes=config.memory_limit_bytes or physical_memory_bytes(),
        facts={"engine": "fake"},
    )


def _fake_with_adapters(engine: FakeEngine, config: WorkerConfig) -> FakeEngine:
    for name, directory in config.adapters.items():
        engine.load_adapter(read_files(name, directory), lambda bytes_: None)
    return engine


def physical_memory_bytes() -> int:
    """Facts about this machine for the log."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
