"""A compiler for MLX's fused operations that has their header precompiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HEADER = "mlx/backend/cpu/compiled_preamble.h"


def precompile_header(directory: Path) -> None:
    """Put a `g++` on the path that compiles a fused operation in 0.2 s of processor time instead of 0.6.

    MLX on a CPU runs it once for each of some 250 operations in the tests, mostly for this header. The options are
    those of mlx/backend/cpu: g++ takes no header that was precompiled with others.
    """
    compiler, mlx = shutil.which("g++"), find_spec("mlx")
    if sys.platform != "linux" or compiler is None or mlx is None:
        return
    include = next(Path(path, "include") for path in mlx.submodule_search_locations or [])
    header, program = directory / "include" / HEADER, directory / "bin" / "g++"
    for path in (header, program):
        path.parent.mkdir(parents=True)
    shutil.copy(include / HEADER, header)
    options = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-I", str(include), "-x", "c++-header"]
    command = [compiler, *options, str(header), "-o", f"{header}.gch"]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        program.write_text(f'#!/bin/sh\nexec "{compiler}" -I "{directory}/include" "$@"\n')
        program.chmod(0o755)
        os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
