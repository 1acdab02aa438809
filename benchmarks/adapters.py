"""`python -m benchmarks.adapters`: what eight adapters cost a step of eight rows on this machine's CPU.

A random model in float32, each row with an adapter of its own on every product of every layer. The share of processor
time is the median over rounds, in each of which steps with and without adapters take turns, so that whatever else the
machine does slows both. Operations are the nodes of a step's graph, each about one launch on a GPU.
"""

from __future__ import annotations

import io
import statistics
import time
from typing import Any

import click

ROWS, RANK = 8, 16
SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "vocab_size": 4096, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
MODULES = {
    "self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 256), "self_attn.v_proj": (512, 256),
    "self_attn.o_proj": (512, 512), "mlp.gate_proj": (512, 1536), "mlp.up_proj": (512, 1536),
    "mlp.down_proj": (1536, 512),
}  # fmt: skip
WARM_UP_STEPS = 4


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--steps", default=16, show_default=True, help="Steps of each kind in a round.")
def main(rounds: int, steps: int) -> None:
    """Print the ratio of processor time and the operations of a step, for NumPy's operations and for MLX's."""
    # MLX is imported with it, and the engine sets its environment first.
    import zmqengine.engine.open  # noqa: F401

    print(f"{'operations':<12} {'adapters':>9} {'time':>6} {'of a step':>10} {'for a layer':>12}")
    for kernels in ("auto", "mlx"):
        for adapters in (1, ROWS):
            ratio, counts = measure(kernels, adapters, rounds, steps)
            extra = (counts[1] - counts[0]) / SHAPE["num_hidden_layers"]
            shown = f"{counts[0]} + {counts[1] - counts[0]}" if counts[0] else "-"
            each = f"{extra:.1f}" if counts[0] else "-"
            print(f"{kernels:<12} {adapters:>9} {ratio:>6.2f} {shown:>10} {each:>12}")


def measure(kernels: Any, adapters: int, rounds: int, steps: int) -> tuple[float, list[int]]:
    """The ratio of processor time of a step with `adapters` over eight rows to a step without; and the nodes of the
    graphs of both, 0 where there is no graph."""
    engines = [_engine(kernels, adapters, is_adapted) for is_adapted in (False, True)]
    for engine in engines:
        for _ in range(WARM_UP_STEPS):
            engine.next()
    ratios = []
    for _ in range(rounds):
        times = []
        for engine in engines:
            began_s = time.process_time()
            for _ in range(steps):
                engine.next()
            times.append(time.process_time() - began_s)
        ratios.append(times[1] / times[0])
    counts = [_nodes(engine) for engine in engines]
    for engine in engines:
        engine.close()
    return statistics.median(ratios), counts


def _engine(kernels: Any, adapters: int, is_adapted: bool) -> Any:
    """An engine with eight rows in decode."""
    import mlx.core as mx

    from zmqengine.bench.models.small_models import build_model
    from zmqengine.engine.adapters.loaded import LoadedAdapters
    from zmqengine.engine.adapters.lora_files import Lora, Pair
    from zmqengine.engine.interface import ModelInfo, RowRequest
    from zmqengine.engine.load.open_model import open_model
    from zmqengine.engine.open import find_ops
    from zmqengine.engine.step.mlx_engine import MlxEngine

    runner: Any = open_model(build_model(SHAPE), *find_ops(kernels)).runner
    loras = []
    for number in range(adapters):
        pairs = {
            (layer, module): Pair(
                0.02 * mx.random.normal((inputs, RANK)), 0.02 * mx.random.normal((RANK, outputs))
            )
            for layer in range(SHAPE["num_hidden_layers"])
            for module, (inputs, outputs) in MODULES.items()
        }
        loras.append(Lora(f"a{number}", str(number), pairs))
    info = ModelInfo("random", SHAPE["vocab_size"], SHAPE["max_position_embeddings"], frozenset(), 0)
    engine = MlxEngine(runner, info, adapters=LoadedAdapters(runner, loras))
    rows = [
        RowRequest(row, [1 + row, 2, 3], adapter=f"a{row % adapters}" if is_adapted else "")
        for row in range(ROWS)
    ]
    assert not engine.insert(rows), "rows did not start"
    return engine


def _nodes(engine: Any) -> int:
    """Nodes of the graph of the engine's next step."""
    import mlx.core as mx

    from zmqengine.engine.models.model_runner import RowPiece

    runner = engine._runner
    if not runner.decoder.ops.on_mlx:
        return 0
    rows = [row for row in engine._rows.values() if not row.gone]
    pieces = [RowPiece(row, row.computed_tokens, 1, samples=1) for row in rows]
    tokens = mx.array([row.tokens[-1] for row in rows], mx.uint32)
    outputs = runner.forward(pieces, tokens, 1)
    written = io.StringIO()
    mx.export_to_dot(written, outputs.logits)
    return written.getvalue().count("shape=rectangle")


if __name__ == "__main__":
    main()
