"""A first row through the whole engine, before anybody is told that it is ready."""

from __future__ import annotations

from zmqengine.engine.interface import Engine, RowRequest

WARM_UP_ROW = -1
_STEPS_MAX = 64


def warm_up(engine: Engine, prompt_tokens: int = 8, output_tokens: int = 4) -> None:
    """Prefill and decode one short row, so that the first request waits for nothing.

    Raises what the engine raises, RuntimeError if the row fails or does not end. The row is gone in any case.
    """
    vocab_size = engine.info.vocab_size
    request = RowRequest(
        row=WARM_UP_ROW,
        prompt=[(7 * place) % vocab_size for place in range(1, prompt_tokens + 1)],
        max_tokens=output_tokens,
    )
    try:
        failures = engine.insert([request])
        for _ in range(_STEPS_MAX):
            if failures:
                raise RuntimeError(f"the warm-up row failed: {failures[0].message}")
            step = engine.next()
            failures = step.failures
            if any(token.finish for token in step.tokens):
                return
        raise RuntimeError(f"the warm-up row did not end in {_STEPS_MAX} steps")
    finally:
        engine.remove([WARM_UP_ROW])
