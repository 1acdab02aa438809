"""Compiled kernels of this folder on disk, where MLX finds them. This module must not import MLX.

MLX compiles a kernel of `mx.fast.cuda_kernel` in each process, for 1 to 3 s, and writes none of them to its cache on
disk. But it looks for each of them there: `JitModule` in mlx/backend/cuda/jit_module.cpp (read at MLX 0.32.4) reads
`NAME_HASH.ptx`, machine code in spite of its name, and `NAME_HASH.txt`, lines of a kernel, a tab and its mangled name.
`HASH` is `std::hash` of the generated source in hexadecimal digits (`CustomKernel::eval_gpu` in custom_kernel.cpp). So
kernels are compiled here and put there before MLX first needs them.

None of that is documented. Where a name or a text is not MLX's, MLX finds no file and compiles the kernel, as it does
without this module. A file must be complete, since MLX fails on others: both are written aside and renamed, the `.ptx`
last, and its size and architecture are in the `.txt`, on a line without a tab, which MLX skips.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from zmqengine.engine.cuda.nvrtc import Compiled, Nvrtc, NvrtcError
from zmqengine.paths import replace_file

log = logging.getLogger("zmqengine.engine")

# The seed of std::hash in libstdc++ (bits/functional_hash.h).
_SEED = 0xC70F6907
# MLX puts files with longer names into directories.
_NAME_LENGTH_MAX = 245


class KernelCache:
    """Kernels for one architecture, such as `sm_90a`, in MLX's cache directory. Nothing here raises."""

    def __init__(self, directory: Path, architecture: str, open_compiler: Callable[[], Nvrtc]) -> None:
        self._directory = directory
        self._architecture = architecture
        self._open_compiler = open_compiler
        self._compiler: Nvrtc | None = None
        self._fault = ""
        self.counts: Counter[str] = Counter()
        """Kernels by origin: on disk, compiled here, or left to MLX."""

    def provide(self, name: str, expression: str, source: bytes) -> None:
        """Have the kernel `expression` of this source on disk; `name` is MLX's for the module."""
        module = module_name(name, source)
        began_s = time.perf_counter()
        reason = ""
        if self._is_there(module):
            origin = "on disk"
        else:
            try:
                self._write(module, expression, self._compile(module, expression, source))
                origin = "compiled here"
            except (NvrtcError, OSError) as error:
                origin, reason = "left to MLX", " ".join(str(error).split())[:500]
        self.counts[origin] += 1
        took_ms = round((time.perf_counter() - began_s) * 1e3)
        log.debug("kernel", extra={"name_of_file": module, "origin": origin, "ms": took_ms, "reason": reason})

    def provide_later(self, kernels: Sequence[tuple[str, str, bytes]]) -> None:
        """`provide` each of these in a thread: kernels of larger batches, which a later step needs."""

        def provide() -> None:
            for kernel in kernels:
                self.provide(*kernel)

        threading.Thread(target=provide, name="kernels", daemon=True).start()

    def _is_there(self, module: str) -> bool:
        try:
            size = (self._directory / f"{module}.ptx").stat().st_size
            with (self._directory / f"{module}.txt").open(encoding="utf-8") as file:
                return file.readline() == self._first_line(size)
        except (OSError, ValueError):
            return False

    def _compile(self, module: str, expression: str, source: bytes) -> Compiled:
        if len(module) > _NAME_LENGTH_MAX:
            raise NvrtcError("its name is too long")
        if self._fault:
            raise NvrtcError(self._fault)
        if self._compiler is None:
            try:
                self._compiler = self._open_compiler()
            except NvrtcError as error:
                self._fault = str(error)
                log.info("each start compiles its kernels: they cannot be kept", extra={"reason": str(error)})
                raise
        return self._compiler.compile(module, expression, source)

    def _write(self, module: str, expression: str, compiled: Compiled) -> None:
        text = f"{self._first_line(len(compiled.cubin))}{expression}\t{compiled.mangled}\n"
        replace_file(self._directory / f"{module}.txt", text.encode())
        replace_file(self._directory / f"{module}.ptx", compiled.cubin)

    def _first_line(self, size: int) -> str:
        return f"{self._architecture} {size} bytes\n"


def module_name(name: str, source: bytes) -> str:
    """MLX's name of the module that is compiled from `source`, without suffix."""
    hash_bytes = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm  # std::_Hash_bytes
    hash_bytes.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    hash_bytes.restype = ctypes.c_size_t
    return f"{name}_{hash_bytes(source, len(source), _SEED):x}"
