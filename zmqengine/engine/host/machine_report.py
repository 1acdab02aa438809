"""MLX's report of this machine, as JSON on standard output. A process of its own: importing MLX may fail."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from zmqengine.engine.host.blas import load_tuned_blas
from zmqengine.engine.host.environment import prepare_environment

_ERROR_MAX = 0.02
"""Maximum relative error. TF32 and bfloat16 stay below 0.005; wrongly built kernels give 0.5 and more."""
_PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm")


def main() -> int:
    """Print the report; exit code 1 and a line on standard error if MLX does not work."""
    blas = load_tuned_blas()
    environment = prepare_environment()
    try:
        import mlx.core as mx

        from zmqengine.engine.host.backend import on_gpu
        from zmqengine.engine.host.device_memory import recommended_bytes, system_bytes

        errors = product_errors(mx)
        if max(errors.values()) > _ERROR_MAX:
            raise ArithmeticError(f"wrong products: {errors}")
        facts = {str(name): value for name, value in mx.device_info().items()}
        report = {
            "mlx": metadata.version("mlx"),
            "device": "gpu" if on_gpu() else "cpu",
            "device_name": str(facts.get("device_name", "")),
            "metal": mx.metal.is_available(),
            "macos": platform.mac_ver()[0],
            "origin": {"path": str(Path(mx.__file__).parent), "packages": packages()},
            "products": errors,
            "blas": blas,
            "environment": [variable._asdict() for variable in environment],
            "system_bytes": system_bytes(),
            "recommended_bytes": recommended_bytes(),
        }
    except Exception as error:  # noqa: BLE001 - the border of this process: one line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report))
    return 0


def product_errors(mx: Any) -> dict[str, float]:
    """Relative errors of products by MLX against numpy's.

    Products of 16 rows and of 720: wrong builds failed in one kernel and not in the other
    (github.com/ml-explore/mlx/issues/3586, 3951, 4525). A device that does not compute raises here.
    """
    random = np.random.default_rng(0)
    errors = {}
    for rows in (16, 720):
        left = random.standard_normal((rows, 512)).astype(np.float32)
        right = random.standard_normal((512, 256)).astype(np.float32)
        expected = left @ right
        for name in ("float32", "float16"):
            product = mx.array(left).astype(getattr(mx, name)) @ mx.array(right).astype(getattr(mx, name))
            computed = np.array(product.astype(mx.float32))
            error = float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))
            # JSON has no NaN, and comparisons with NaN are false.
            errors[f"{rows} rows {name}"] = error if np.isfinite(error) else 1e9
    return errors


def packages() -> dict[str, dict[str, str]]:
    """Release, installer and platform tag of MLX's packages, from their metadata."""
    versions = {}
    for name in _PACKAGES:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        wheel = package.read_text("WHEEL") or ""
        tags = [line.partition(":")[2].strip() for line in wheel.splitlines() if line.startswith("Tag:")]
        versions[name] = {
            "version": package.version,
            "installer": (package.read_text("INSTALLER") or "").strip(),
            "tag": tags[0] if tags else "",
            "source": "a checkout" if package.read_text("direct_url.json") else "",
        }
    return versions


if __name__ == "__main__":
    sys.exit(main())
