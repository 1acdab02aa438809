"""A step has one of few shapes, whatever the traffic: MLX traces each, and reuses buffers of about its size alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.drafts import Self, speculator
from tests.support.engines import make_engine
from tests.support.models import LLAMA, build_model
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.models import attention, slot_runner
from zmqengine.engine.models.attention import padded
from zmqengine.engine.models.ops import PlainOps

STEPS = 200


class Shapes:
    """The shapes of what steps compute: tokens, wanted hidden states, short rows, and prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: set[int] = set()
        self.wanted: set[int] = set()
        self.short: set[tuple[int, int, int]] = set()
        self.prompts: set[tuple[int, int]] = set()
        # How many there were without rounding.
        self.unlike: set[Any] = set()
        layout_of, tokens_of, wanted = attention.layout_of, PlainOps.padded, slot_runner._Wanted

        def noted_layout(pieces: Any) -> Any:
            layouts = layout_of(pieces)
            for layout in layouts:
                if layout.short is not None:
                    self.short.add((*layout.short.tokens.shape, layout.short.columns))
                self.prompts |= {(padded(piece.count), piece.columns) for piece in layout.prompts}
                self.unlike |= {(piece.count, piece.start) for piece in layout.prompts}
            return layouts

        def noted_tokens(ops: PlainOps, tokens: int) -> int:
            self.tokens.add(tokens_of(ops, tokens))
            return tokens_of(ops, tokens)

        class Noted(wanted):  # type: ignore[misc, valid-type]
            def __init__(noted, *given: Any) -> None:  # noqa: N805
                super().__init__(*given)
                self.wanted.add(len(noted.indices))

        monkeypatch.setattr(attention, "layout_of", noted_layout)
        monkeypatch.setattr(PlainOps, "padded", noted_tokens)
        monkeypatch.setattr(slot_runner, "_Wanted", Noted)


def test_sizes_are_four_between_two_powers_of_two() -> None:
    """Up to 8 each count is a size of its own."""
    counts = (1, 5, 7, 8, 9, 15, 17, 31, 33)
    assert [few_sizes(count) for count in counts] == [1, 5, 7, 8, 10, 16, 20, 32, 40]
    assert [few_sizes(count, least=4) for count in counts[:5]] == [4, 8, 8, 8, 12]


@pytest.mark.parametrize("drafting", [False, True])
def test_random_traffic_has_some_dozens_of_shapes(monkeypatch: pytest.MonkeyPatch, drafting: bool) -> None:
    """Of prompts of any length, alone and beside up to 16 rows of any length."""
    model = build_model(
        {**LLAMA, "num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4, "intermediate_size": 16}
    )
    shapes = Shapes(monkeypatch)
    drafts = speculator(Self(model), widths=(1, 4)) if drafting else None
    engine = make_engine(
        model, kernels="mlx", rows_max=16, prefill_chunk=256, prefill_chunk_idle=1024, speculator=drafts
    )
    for seen in (shapes.tokens, shapes.wanted, shapes.short, shapes.prompts, shapes.unlike):
        seen.clear()
    draw = random.Random(1)
    count, rows = 0, 0
    for _ in range(STEPS):
        if rows < 16 and draw.random() < 0.3:
            length = min(1900, int(draw.lognormvariate(5, 1.2)) + 1)
            tokens = [draw.randrange(300) for _ in range(length)]
            engine.insert([RowRequest(count, tokens, draw.randrange(1, 60))])
            count, rows = count + 1, rows + 1
        rows -= sum(token.finish is not None for token in engine.next().tokens)
    assert count > 50
    assert len(shapes.unlike) > 50
    # Four numbers between two powers of two, up to a step of 1,024 tokens.
    assert len(shapes.tokens) <= 4 * 9
    assert len(shapes.wanted) <= 4 * 5
    # Slots of three capacities, the largest for the whole context and a verify block, in fourths.
    columns = {capacity * part // 4 for capacity in (512, 1024, 2560) for part in range(1, 5)}
    assert {read for _, _, read in shapes.short} | {read for _, read in shapes.prompts} <= columns
    assert len(shapes.short) <= 100
    assert len(shapes.prompts) <= 80
