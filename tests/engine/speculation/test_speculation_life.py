"""Whatever happens to rows that draft, they make what they make without: many random lives of them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.engine.models.families import MOE
from tests.support.drafts import Erring, Self, Widths
from tests.support.engines import finish, make_engine
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.verify_block import VerifyBlock

OPERATIONS = int(os.environ.get("ZMQENGINE_TEST_DRAFT_OPERATIONS", "150"))
KINDS = 16
TOKENS = 40
ROWS_MAX = 12
# Of a few words, which come again.
BABBLE = Sampling(temperature=10.0, logit_bias=dict.fromkeys(range(10, 14), 100.0))
HOT = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.3)


class Noted(Widths):
    """Keeps the drafts of each row until they are judged."""

    said: dict[int, list[list[int]]]

    def plan(self, rows: Sequence[Row]) -> VerifyBlock | None:
        block = super().plan(rows)
        if block is not None:
            for row, draft in zip(rows, block.drafts, strict=True):
                if draft is not None:
                    self.said.setdefault(row.id, []).append(list(draft.tokens))
        return block


class Life:
    """Rows that come, go, are parked and come back; `step` checks all that is told of them against plain outputs."""

    def __init__(self, model, kind: str) -> None:
        self._draw = random.Random(3)
        self._kinds = [self._kind(number) for number in range(KINDS)]
        self._outputs = []
        plain = make_engine(model)
        for request in self._kinds:
            plain.insert([request])
            self._outputs.append(finish(plain).ids(request.row))
        known = {
            (tuple(request.prompt), seed_key(request.seed)): output
            for request, output in zip(self._kinds, self._outputs, strict=True)
        }
        source = {
            "set": lambda: Erring(known),
            "ngram": lambda: Ngrams(VOCAB_SIZE),
            "draft": lambda: Self(model),
        }
        self._noted = Noted([source[kind]()], (1, 2, 3, 6))
        self._noted.said = {}
        self.engine = make_engine(model, speculator=self._noted, rows_max=ROWS_MAX)
        self._next = 0
        self._made: dict[int, tuple[int, list[int]]] = {}
        self.drafted = self.finished = 0

    def operation(self) -> None:
        """Something at random."""
        choice, rows = self._draw.random(), sorted(self._made)
        if choice < 0.15 and len(rows) < ROWS_MAX:
            self._insert(self._draw.randrange(KINDS), [])
        elif choice < 0.18 and rows:
            gone = self._draw.choice(rows)
            self.engine.remove([gone])
            del self._made[gone]
        elif choice < 0.24 and rows:
            parked = self._draw.choice(rows)
            self.engine.park(parked)
            self._insert(*self._made.pop(parked))
        else:
            self.step()

    def step(self) -> None:
        result = self.engine.next()
        assert result.failures == []
        before = {row: len(output) for row, (_, output) in self._made.items()}
        for token in result.tokens:
            number, output = self._made[token.row]
            assert token.token == self._outputs[number][len(output)], (
                f"output {len(output)} of row {token.row}"
            )
            output.append(token.token)
            assert (token.finish is not None) == (len(output) == len(self._outputs[number]))
        for draft in result.drafts:
            number, output = self._made[draft.row]
            said = self._noted.said[draft.row].pop(0)
            assert 0 < draft.proposed == len(said)
            # Beside prompts a CPU reports two steps at once: a plain one may come before the block, or behind it.
            starts = range(before[draft.row], before[draft.row] + 2)
            rights = [_right(said, self._outputs[number][start:]) for start in starts]
            fits = [
                start
                for start, right in zip(starts, rights, strict=True)
                if draft.accepted == min(right, len(output) - start)
                and len(output) >= min(start + right + 1, len(self._outputs[number]))
            ]
            assert fits
            before[draft.row] = fits[0] + draft.accepted + 1
            self.drafted += draft.proposed
        for row in {draft.row for draft in result.drafts}:
            assert len(self._made[row][1]) - before[row] <= 1
        for token in result.tokens:
            if token.finish is not None:
                del self._made[token.row]
                self.finished += 1
        self._check()

    def _check(self) -> None:
        """Caches hold what rows say they hold, and padding stays within its bound."""
        memory = self.engine.memory()
        assert memory.padding <= self.engine.padding_bytes_max
        slots = [
            slot for pool in vars(self.engine)["_runner"].slots.pools.values() for slot in pool.slots if slot
        ]
        held = [row.cache for row in self.engine._rows.values() if row.cache is not None]
        assert set(map(id, held)) <= set(map(id, slots))
        assert len(slots) == len(held) + len(self.engine._store.parked)
        assert self.engine.stats().rows_decoding + self.engine.stats().rows_prefilling == len(self._made)

    def _insert(self, number: int, emitted: list[int]) -> None:
        self._next += 1
        request = replace(self._kinds[number], row=self._next, emitted=list(emitted))
        assert self.engine.insert([request]) == []
        self._made[self._next] = number, list(emitted)

    def _kind(self, number: int) -> RowRequest:
        prompt = [self._draw.randrange(VOCAB_SIZE) for _ in range(self._draw.choice((1, 3, 20, 70)))]
        return RowRequest(
            -1 - number,
            prompt * (1 + number % 2),
            self._draw.randrange(5, TOKENS),
            sampling=(HOT, Sampling(), BABBLE)[number % 3],
            seed=number,
            speculate=number % 7 != 6,
        )


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("llama", "set"),
        ("mixture", "set"),
        pytest.param("llama", "ngram", marks=pytest.mark.slow),
        pytest.param("mixture", "ngram", marks=pytest.mark.slow),
        pytest.param("llama", "draft", marks=pytest.mark.slow),
        pytest.param("mixture", "draft", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(7200)
def test_a_random_life_makes_the_plain_tokens_and_tells_the_right_counts(models, shape, kind):
    """Rows join, leave and are parked between windows; what was accepted is what a plain run would have accepted."""
    model = build_model(MOE) if shape == "mixture" else models[shape]
    life = Life(model, kind)
    for _ in range(OPERATIONS):
        life.operation()
    while life.engine.stats().rows_decoding or life.engine.stats().rows_prefilling:
        life.step()
    assert life.drafted >= OPERATIONS / (50 if kind == "ngram" else 5)
    assert life.finished > OPERATIONS / 50


def _right(said: list[int], coming: list[int]) -> int:
    """The number of draft tokens before the first wrong one."""
    alike = [ours == theirs for ours, theirs in zip(said, coming, strict=False)]
    return alike.index(False) if False in alike else len(alike)
