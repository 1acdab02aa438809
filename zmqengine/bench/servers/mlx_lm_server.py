"""`mlx_lm.server` with the BLAS our worker uses: `python -m zmqengine.bench.servers.mlx_lm_server` and its own options.

MLX takes the BLAS that is loaded when it is imported, so ours has to come first. On macOS this changes nothing.
"""

from zmqengine.engine.host.blas import load_tuned_blas

if __name__ == "__main__":
    load_tuned_blas()

    from mlx_lm.server import main

    main()  # type: ignore[no-untyped-call]
