"""NVRTC, the CUDA compiler that MLX loads, for the kernels of this folder. This module must not import MLX.

Called as in `compile` of mlx/backend/cuda/jit_module.cpp (MLX 0.32.4), with one difference: of MLX's headers a kernel
gets `mlx_types.cuh` alone, since to parse the others takes ten times the time of a kernel.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Lines of MLX's headers on which `mlx_types.cuh` relies. The text of the headers is in MLX's library.
_RELIED_ON = (
    b"#define MAX_NDIM 10\n",
    b"\nusing Shape = cuda::std::array<int32_t, MAX_NDIM>;\nusing Strides = cuda::std::array<int64_t, MAX_NDIM>;\n",
)
_RELEASES = (13, 12)


class NvrtcError(Exception):
    """The compiler or MLX's library is missing or another than expected, or a kernel does not compile."""


class Compiled(NamedTuple):
    """Machine code of a kernel, and its mangled name."""

    cubin: bytes
    mangled: str


class Nvrtc:
    """The compiler for one architecture, such as `sm_90a`.

    `headers`: texts by the name under which kernels include them. Raises NvrtcError.
    """

    def __init__(self, architecture: str, headers: Mapping[str, str]) -> None:
        package = _mlx_directory()
        _check(package / "lib" / "libmlx.so")
        self._library, release = _library()
        self._names = _strings([name.encode() for name in headers])
        self._texts = _strings([text.encode() for text in headers.values()])
        self._options = _strings(
            [
                # NVRTC 13.0 takes generic lambdas of a kernel for functions of the host without it.
                b"--device-as-default-execution-space",
                f"--gpu-architecture={architecture}".encode(),
                f"--include-path={_cuda_headers(package, release)}".encode(),
            ]
        )

    def compile(self, name: str, expression: str, source: bytes) -> Compiled:
        """The kernel `expression`, its name with namespaces, of a source known as `name`. Raises NvrtcError."""
        program = ctypes.c_void_p()
        file = f"{name}.cu".encode()
        headers = len(self._names), self._texts, self._names
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, file, *headers)
        try:
            self._call("nvrtcAddNameExpression", program, expression.encode())
            try:
                self._call("nvrtcCompileProgram", program, len(self._options), self._options)
            except NvrtcError as error:
                log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise NvrtcError(f"{error}: {log}") from None
            mangled = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(mangled))
            return Compiled(self._bytes("CUBIN", program), (mangled.value or b"").decode())
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, result: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{result}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{result}", program, found)
        return found.raw

    def _call(self, function: str, *arguments: object) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise NvrtcError(f"{function}: {self._library.nvrtcGetErrorString(code).decode()}")


def _check(mlx: Path) -> None:
    try:
        with mlx.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if any(text.find(line) < 0 for line in _RELIED_ON):
                raise NvrtcError(f"{mlx} passes shapes to kernels in another way")
    except (OSError, ValueError) as error:
        raise NvrtcError(f"{mlx} cannot be read: {error}") from None


def _mlx_directory() -> Path:
    found = importlib.util.find_spec("mlx.core")
    if found is None or found.origin is None:
        raise NvrtcError("MLX is not installed as files")
    return Path(found.origin).parent


def _library() -> tuple[ctypes.CDLL, int]:
    """The library that MLX has loaded, and its release."""
    for release in _RELEASES:
        try:
            library = ctypes.CDLL(f"libnvrtc.so.{release}")
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library, release
    raise NvrtcError("NVRTC cannot be loaded")


def _cuda_headers(package: Path, release: int) -> Path:
    own = package.parent / "nvidia" / (f"cu{release}" if release > 12 else "cuda_runtime") / "include"
    if own.is_dir():
        return own
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return Path(home) / "include"


def _strings(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)
