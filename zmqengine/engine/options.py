"""Options of an engine, a part of the worker's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from zmqengine.errors import ConfigError
from zmqengine.option import DAY_MS, MIB, check, option
from zmqengine.paths import cache_directory

GIB = 1 << 30

Speculate = Literal["off", "auto", "ngram", "draft"]
Kernels = Literal["auto", "mlx", "metal"]
WiredLimit: TypeAlias = Literal["weights", "off", "all"] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine. The constructor raises `ConfigError` with a remedy. Every `WorkerConfig` is one."""

    rows_max: int = option(
        32, within=(1, 4096), help="Requests in the batch at once, in prefill and decode together."
    )
    prefill_chunk: int = option(
        2048,
        within=(1, 65_536),
        help="Maximum prompt tokens prefilled in one pass; --prefill-ms makes it less on slower machines.",
    )
    prefill_ms: float = option(
        200.0,
        within=(0, DAY_MS),
        help="Milliseconds that prefill may add to a pass while other requests decode: chunks shrink to it. "
        "Up to 1.5 times as much while more requests wait than decode, 2.5 times while none decodes; 0 for no "
        "limit.",
    )
    prompt_cache_bytes: int | None = option(
        None,
        within=(0, 1 << 50),
        help="Memory for the prefix cache, which prompts with the same beginning share; 0 for none.",
        otherwise="--prompt-cache-share",
    )
    kv_bits: int | None = option(
        None,
        within=(8, 8),
        help="8 keeps keys and values in 8 bits, of running requests too where attention can read them, and in the "
        "prefix cache, in memory and on disk: 1.8 times as many tokens, on a CPU up to 3 times. status says where.",
        otherwise="as they were computed",
    )
    adapter: tuple[str, ...] = option(
        (),
        help="A LoRA adapter for requests that name it, in mlx-lm's or PEFT's files. Once for each.",
        metavar="NAME=DIR",
    )
    speculate: Speculate = option(
        "auto",
        help="Speculative decoding: draft tokens of n-grams, of the draft model, or of every source that gains speed. "
        "The output is the same. On Metal auto needs --draft or a model with a head.",
    )
    draft: str | None = option(
        None,
        help="Draft model for --model, a smaller one with the same tokenizer: a bundled one, a directory or a hub id. "
        "Or the directory of a drafter that was made for the model: EAGLE-3, DFlash, a Gemma 4 assistant, or a head.",
        otherwise="none",
    )
    cache_dir: str | None = option(
        None,
        help="Directory for the prefix cache on disk, in files of this user alone: prompts survive a restart. "
        "auto is ~/.cache/zmqengine, on macOS ~/Library/Caches/zmqengine.",
        otherwise="memory alone",
    )
    cache_dir_bytes: int = option(
        20 * GIB,
        within=(MIB, 1 << 60),
        help="Maximum bytes of files in --cache-dir, other workers' files included.",
    )
    cache_dir_free_bytes: int = option(
        10 * GIB, within=(0, 1 << 60), help="Bytes that stay free on the disk of --cache-dir."
    )
    cache_dir_writes_bytes: int = option(
        64 * GIB,
        within=(0, 1 << 60),
        help="Maximum bytes that this worker writes to --cache-dir in a day.",
    )
    warm_up_s: float = option(
        90.0,
        within=(0, 3600),
        help="Maximum seconds at the start for autotuning, and on a GPU for warm-up; 0 for neither.",
    )
    kernels: Kernels = option(
        "auto",
        help="auto takes kernels for this device where they agree with MLX's operations; mlx runs the model by MLX's "
        "documented operations alone: the first aid where a kernel is wrong; metal takes those for Macs, which no Mac "
        "has run yet.",
    )
    tf32: bool = option(
        False,
        help="TF32: round float32 factors to 10 bits where the GPU is faster so (M5, CUDA). A row's tokens may then "
        "depend on the rows beside it. Encoders do so in any case, unless MLX_ENABLE_TF32 is 0.",
    )
    wired_limit: WiredLimit = option(
        "weights",
        within=(0, 1 << 50),
        help="macOS: memory that is never paged out: weights, off, all (the memory limit), or a size such as 12G. "
        "More than the weights can make macOS panic: docs/macs.md.",
        unit="bytes",
    )

    def __post_init__(self) -> None:
        check(self)
        _ = self.adapters
        if self.speculate == "draft" and self.draft is None:
            raise ConfigError("--speculate draft needs --draft: a smaller model with the same tokenizer")

    @property
    def prefill_s(self) -> float:
        """`prefill_ms` in seconds."""
        return self.prefill_ms / 1000

    @property
    def adapters(self) -> dict[str, Path]:
        """The directory of each adapter, by name. Raises `ConfigError`."""
        found: dict[str, Path] = {}
        for pair in self.adapter:
            name, _, directory = pair.partition("=")
            if not name or not directory or ":" in name or name in found:
                raise ConfigError(f"--adapter is {pair!r}: it must be NAME=DIR, with another name for each")
            found[name] = Path(directory).expanduser()
        return found

    @property
    def cache_path(self) -> Path | None:
        """Directory of the prefix cache on disk, with `auto` resolved."""
        if self.cache_dir is None:
            return None
        return cache_directory() if self.cache_dir == "auto" else Path(self.cache_dir).expanduser()
