"""Kernels of `mx.fast.cuda_kernel` that are compiled once for a machine; see `kernel_cache.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from zmqengine.engine.cuda.kernel_cache import KernelCache
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.nvrtc import Nvrtc
from zmqengine.engine.host.backend import on_cuda

Template = Sequence[tuple[str, Any]]
Arrays = list[mx.array]
Variant = Callable[..., Arrays]
"""A kernel bound to template arguments and types; called with the other arguments of a kernel of MLX."""

# MLX's names of types in the name of a kernel and in its text (backend/common/compiled.cpp, backend/cuda/utils.cpp).
# Types without an entry have one name in both.
_TYPES = {
    mx.float32: ("float", "float"),
    mx.float16: ("float16_t", "__half"),
    mx.bfloat16: ("bfloat16_t", "__nv_bfloat16"),
    mx.bool_: ("bool", "bool"),
}
# `default_header` of mlx/backend/cuda/custom_kernel.cpp.
_BEGIN = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
HEADERS = {
    "mlx/backend/cuda/device/utils.cuh": kernel_text("mlx_types.cuh"),
    "cooperative_groups.h": "#pragma once\nnamespace cooperative_groups {}\n",
}


class Kernel:
    """A kernel with the arguments of `mx.fast.cuda_kernel`. Its inputs are arrays of at least one dimension."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        *,
        ensure_row_contiguous: bool = True,
        shared_memory: int = 0,
    ) -> None:
        self._name = name
        self._input_names = input_names
        self._output_names = output_names
        self._source = source
        self._header = header
        self._call: Any = mx.fast.cuda_kernel(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
            shared_memory=shared_memory,
        )

    def to_provide(
        self, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
    ) -> tuple[str, str, bytes]:
        """The arguments of `KernelCache.provide` for this variant."""
        name, text = self.generated(template, inputs, outputs)
        return name, f"mlx::core::cu::{name}", text.encode()

    def variant(self, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> Variant:
        """The kernel with these template arguments, for arrays of these types. Callers keep it, since it is looked for
        on disk."""
        kept = kernel_cache()
        if kept is not None:
            kept.provide(*self.to_provide(template, inputs, outputs))
        return partial(self._call, template=list(template), output_dtypes=list(outputs))

    def generated(
        self, template: Template, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
    ) -> tuple[str, str]:
        """The kernel's name and text as MLX makes them: `template_arguments_hash` and `build_kernel` of
        mlx/backend/cuda/custom_kernel.cpp."""
        name = f"custom_kernel_{self._name}" + "".join(f"_{_in_name(value)}" for _, value in template)
        parameters = []
        for one, dtype in zip(self._input_names, inputs, strict=True):
            parameters.append(f"const {_in_text(dtype)}* {one}")
            for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if f"{one}_{suffix}" in self._source:
                    parameters.append(f"const __grid_constant__ {kind} {one}_{suffix}")
        parameters += [
            f"{_in_text(dtype)}* {one}" for one, dtype in zip(self._output_names, outputs, strict=True)
        ]
        constants = "".join(
            f"  using {one} = {_in_text(value)};\n"
            if isinstance(value, mx.Dtype)
            else f"  constexpr {type(value).__name__} {one} = {str(value).lower()};\n"
            for one, value in template
        )
        return name, (
            f"{_BEGIN}{self._header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
            f"__global__ void {name}(\n    "
            + ",\n    ".join(parameters)
            + f") {{\n{constants}{chr(10) if template else ''}{self._source}\n}}\n\n}} // namespace mlx::core::cu\n"
        )


def provide_later(kernels: Sequence[tuple[str, str, bytes]]) -> None:
    """Have kernels, as `Kernel.to_provide` describes them, compiled by a thread, if this process keeps any."""
    kept = kernel_cache()
    if kept is not None:
        kept.provide_later(kernels)


@cache
def kernel_cache() -> KernelCache | None:
    """Kernels on disk for the device in use; None without CUDA, or without a directory for them."""
    directory = os.environ.get("MLX_PTX_CACHE_DIR")
    if not directory or not on_cuda():
        return None
    info = mx.device_info()
    major, minor = info.get("compute_capability_major", 0), info.get("compute_capability_minor", 0)
    architecture = f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"
    return KernelCache(Path(directory), architecture, partial(Nvrtc, architecture, HEADERS))


def _in_name(value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return _names(value)[0]
    return str(value)[0].lower() if isinstance(value, bool) else str(value)


def _in_text(dtype: mx.Dtype) -> str:
    return _names(dtype)[1]


def _names(dtype: mx.Dtype) -> tuple[str, str]:
    name = str(dtype).rpartition(".")[2] + "_t"
    return _TYPES.get(dtype, (name, name))
