"""`mlx_lm.server` with our worker's BLAS: `python -m zmqengine.bench.servers.mlx_lm_server` and its own options.

MLX binds to the BLAS that is loaded when it is imported, so ours must be loaded first. No effect on macOS.
"""

from zmqengine.engine.host.blas import load_tuned_blas

if __name__ == "__main__":
    load_tuned_blas()

    from mlx_lm.server import main

    main()  # type: ignore[no-untyped-call]
