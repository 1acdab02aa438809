"""What MLX says of this machine, as JSON on standard output. A process of its own: importing MLX may fail."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from zmqengine.engine.host.blas import load_tuned_blas
from zmqengine.engine.host.environment import prepare_environment


def main() -> int:
    """Print it; code 1 and a line on standard error if MLX does not work here."""
    blas = load_tuned_blas()
    environment = prepare_environment()
    try:
        import mlx.core as mx

        from zmqengine.engine.host.backend import on_gpu
        from zmqengine.engine.host.memory import recommended_bytes, system_bytes

        # A device that is there and does not compute is found out here.
        mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
        facts = {str(name): value for name, value in mx.device_info().items()}
        report = {
            "mlx": version("mlx"),
            "device": "gpu" if on_gpu() else "cpu",
            "device_name": str(facts.get("device_name", "")),
            "metal": mx.metal.is_available(),
            "blas": blas,
            "environment": [standing._asdict() for standing in environment],
            "system_bytes": system_bytes(),
            "recommended_bytes": recommended_bytes(),
        }
    except Exception as error:  # noqa: BLE001 - the border of this process: one line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
