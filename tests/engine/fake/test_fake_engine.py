"""The fake engine follows the contract and fails where it is told to."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from zmqengine.engine.fake.fake_engine import (
    EXIT_CODE,
    FakeEngine,
    FakeEngineConfig,
    FakeEngineError,
    FakeFault,
    expected_tokens,
)
from zmqengine.engine.grammar.thinking import thinking_bound
from zmqengine.engine.interface import RowRequest, StepResult

POISON = 999


def request(row: int = 0, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 8, **fields) -> RowRequest:
    return RowRequest(row=row, prompt=prompt, max_tokens=max_tokens, **fields)


def run(engine: FakeEngine, steps: int = 100) -> dict[int, list[int]]:
    output: dict[int, list[int]] = {}
    for _ in range(steps):
        for token in engine.next().tokens:
            output.setdefault(token.row, []).append(token.token)
    return output


def test_output_is_what_expected_tokens_says_alone_and_among_others():
    """A front-end author can compute the stream that a worker on the fake engine must deliver."""
    rows = [request(row, prompt=(row + 1, 2), seed=row) for row in range(8)]
    engine = FakeEngine()
    assert engine.insert(rows) == []
    output = run(engine)
    assert output == {row.row: expected_tokens(row) for row in rows}
    alone = FakeEngine()
    alone.insert(rows[3:4])
    assert run(alone)[3] == output[3]


def test_a_resumed_row_goes_on_where_it_was():
    """Inserting with `emitted` continues at the next index with the same tokens."""
    whole = expected_tokens(request(seed=9))
    engine = FakeEngine()
    engine.insert([request(seed=9, emitted=whole[:3])])
    assert run(engine)[0] == whole[3:]


def test_prefill_takes_one_chunk_a_step_and_reports_its_progress():
    """A prompt longer than the chunk is read over several steps and then decodes."""
    engine = FakeEngine(FakeEngineConfig(prefill_chunk=4))
    engine.insert([request(prompt=tuple(range(1, 11)))])
    progress = [engine.next() for _ in range(3)]
    assert [(p.done, p.total) for step in progress for p in step.prefills] == [(4, 10), (8, 10), (10, 10)]
    assert not any(step.tokens for step in progress)
    assert len(engine.next().tokens) == 1


def test_a_row_stops_at_its_stop_token_and_at_its_length():
    """The stop token is the last of the output; max_tokens counts the whole output."""
    engine = FakeEngine(FakeEngineConfig(eos_index=2))
    engine.insert([request(0, stop_token_ids=frozenset({0})), request(1, prompt=(9,), max_tokens=2)])
    finishes = {t.row: (t.token, t.finish) for _ in range(9) for t in engine.next().tokens if t.finish}
    assert finishes[0] == (0, "stop")
    assert finishes[1][1] == "length"
    assert engine.stats().rows_decoding == 0


def test_an_instant_row_finishes_in_the_step_after_insert():
    """All tokens can be published the moment a row is inserted."""
    engine = FakeEngine(FakeEngineConfig(instant=True))
    engine.insert([request(max_tokens=5)])
    step = engine.next()
    assert [t.token for t in step.tokens] == expected_tokens(request(max_tokens=5))
    assert step.prefills[0].done == 3


@pytest.mark.parametrize("place", ["insert", "prefill", "token"])
def test_a_failing_row_leaves_and_the_others_go_on(place):
    """A poisoned row is reported as failed wherever it fails; its neighbour's stream is whole."""
    fault = FakeFault(place=place, action="fail", token=POISON, index=2 if place == "token" else None)
    engine = FakeEngine(FakeEngineConfig(faults=(fault,)))
    bad, good = request(1, prompt=(POISON,)), request(2)
    failures = engine.insert([bad, good])
    output: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(20):
        step: StepResult = engine.next()
        failures += step.failures
        for token in step.tokens:
            output[token.row].append(token.token)
    assert [failure.row for failure in failures] == [1]
    assert output == {1: expected_tokens(bad)[: 2 if place == "token" else 0], 2: expected_tokens(good)}


def test_a_poisoned_row_makes_every_step_raise_until_it_is_removed():
    """`next()` can be made to raise for as long as one row is present."""
    engine = FakeEngine(
        FakeEngineConfig(faults=(FakeFault(place="next", action="raise", token=POISON, times=None),))
    )
    engine.insert([request(1, prompt=(POISON,)), request(2)])
    for _ in range(3):
        with pytest.raises(FakeEngineError):
            engine.next()
    engine.remove([1, 1, 77])
    assert run(engine)[2] == expected_tokens(request(2))


def test_a_step_can_raise_once():
    """A fault of one step strikes at that step and never again."""
    engine = FakeEngine(FakeEngineConfig(faults=(FakeFault(place="next", action="raise", index=1),)))
    engine.insert([request()])
    engine.next()
    with pytest.raises(FakeEngineError):
        engine.next()
    engine.reset()
    engine.insert([request()])
    assert run(engine)[0] == expected_tokens(request())


def test_a_step_can_block():
    """A blocked engine stays in `next()` until it is let go."""
    engine = FakeEngine(FakeEngineConfig(faults=(FakeFault(place="next", action="block"),)))
    thread = threading.Thread(target=engine.next, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    engine.unblock.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_process_can_be_made_to_die():
    """The configuration crosses a command line as JSON, and `exit` ends the child at once."""
    config = FakeEngineConfig(step_ms=0.5, faults=(FakeFault(place="next", action="exit", index=0),))
    assert FakeEngineConfig.from_json(config.to_json()) == config
    code = (
        "import sys; from zmqengine.engine.fake.fake_engine import *;"
        "FakeEngine(FakeEngineConfig.from_json(sys.argv[1])).next()"
    )
    child = subprocess.run([sys.executable, "-c", code, config.to_json()], timeout=60, check=False)
    assert child.returncode == EXIT_CODE


def test_rows_over_the_limit_and_repeated_ids_are_refused():
    """`insert` says which rows it did not take."""
    engine = FakeEngine(FakeEngineConfig(rows_max=2))
    failures = engine.insert([request(1), request(1), request(2), request(3)])
    assert [failure.row for failure in failures] == [1, 3]


def test_calls_are_recorded_with_their_thread():
    """A test can assert that one thread made every call."""
    engine = FakeEngine()
    engine.insert([request()])
    engine.next()
    engine.remove([0])
    engine.close()
    engine.close()
    assert [call.method for call in engine.calls] == ["insert", "next", "remove", "close", "close"]
    assert {call.thread for call in engine.calls} == {threading.get_ident()}


def test_it_does_not_import_mlx():
    """A front-end's tests run where MLX is not installed."""
    code = "import sys, zmqengine.engine.fake.fake_engine; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_reasoning_is_bounded_and_resumed_by_the_contract():
    """The closer comes at the bound, the output goes on behind it, and a resumed row knows how far it was."""
    plain = expected_tokens(request(max_tokens=30))
    opened = thinking_bound(5, [700, 701], then=[702], opened=True)
    row = request(max_tokens=30, thinking=opened)
    assert expected_tokens(row) == [*plain[:5], 700, 701, 702, *plain[8:]]
    opener = plain[3]
    again = thinking_bound(4, [700], [opener], repeats=True)
    wanted = expected_tokens(request(max_tokens=30, thinking=again))
    assert wanted == [*plain[:8], 700, *plain[9:]]
    barred = thinking_bound(0, [700], [opener], repeats=True)
    assert opener not in expected_tokens(request(max_tokens=30, thinking=barred))
    for bound in (opened, again, barred):
        row = request(max_tokens=30, thinking=bound)
        whole = expected_tokens(row)
        for cut in range(30):
            engine = FakeEngine()
            assert engine.insert([request(max_tokens=30, thinking=bound, emitted=whole[:cut])]) == []
            assert run(engine)[0] == whole[cut:]
