"""`zmqengine conformance`: a front-end of sockets and maps alone tries every rule of SPEC.md on a worker."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.support.workers import START_S, WorkerProcess
from zmqengine.cli.commands.conformance import conformance
from zmqengine.conformance import check
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.fake.fake_vectors import FakeTexts, fake_vector
from zmqengine.protocol.messages import Done, Replay, TokenRow
from zmqengine.testing import FakeWorker
from zmqengine.worker.intake import commands
from zmqengine.worker.intake.commands import CommandHandler
from zmqengine.worker.lifecycle import Lifecycle
from zmqengine.worker.requests import images, token_log, vector_log


@pytest.mark.process
def test_our_worker_keeps_every_rule() -> None:
    """With a real model: what an author in another language would write from the page works as written."""
    with WorkerProcess(None, supervise=False) as worker:
        worker.wait_ready()
        outcomes = list(check(worker.address, answer_s=START_S))
    assert len(outcomes) >= 30
    assert {outcome.rule.says: outcome.problem for outcome in outcomes if outcome.problem} == {}


def test_a_worker_of_vectors_keeps_every_rule_of_them() -> None:
    """Beside a model that generates as well; and one that only makes vectors refuses to generate, which breaks none."""
    both = FakeEngineConfig(dimensions=24, prefill_chunk=8)
    scores = FakeEngineConfig(labels=1, generates=False)
    for config, only in ((both, "E embed"), (scores, "")):
        with FakeWorker(config) as worker:
            outcomes = list(check(worker.address, answer_s=START_S, only=only))
        assert len(outcomes) >= 6
        assert {outcome.rule.says: outcome.problem for outcome in outcomes if outcome.problem} == {}


def test_a_worker_that_reads_prompts_in_part_keeps_every_rule_of_inserts() -> None:
    """A prompt has the same part chosen after `emitted`, and `pin` is refused beside it."""
    with FakeWorker(FakeEngineConfig(keeps=True)) as worker:
        outcomes = list(check(worker.address, answer_s=START_S, only="I insert"))
    assert any("prefill_keep" in outcome.rule.says for outcome in outcomes)
    assert {outcome.rule.says: outcome.problem for outcome in outcomes if outcome.problem} == {}


def test_a_worker_that_sees_keeps_every_rule_of_images() -> None:
    """Images by contents, for their scope, and again when they are gone."""
    with FakeWorker(FakeEngineConfig(vision=True)) as worker:
        outcomes = list(check(worker.address, answer_s=START_S, only="G image"))
    assert len(outcomes) >= 4
    assert {outcome.rule.says: outcome.problem for outcome in outcomes if outcome.problem} == {}


def typed(*words: str) -> Result:
    return CliRunner().invoke(conformance, ["--answer-timeout", str(START_S), *words])


def test_the_command_prints_a_line_for_each_rule() -> None:
    """Over tcp as well as over ipc; exit code 0."""
    with FakeWorker(process=True, bind="tcp://127.0.0.1:0") as worker:
        result = typed("--address", worker.address)
        assert result.exit_code == 0, result.output
        assert len(re.findall("^kept    [A-Z]", result.stdout, re.MULTILINE)) >= 20
        assert re.search(r"^(\d+) of \1 rules kept", result.stderr, re.MULTILINE)
        assert typed("--address", worker.address, "--only", "no such words").exit_code == 2


def test_where_no_worker_is_every_rule_is_broken() -> None:
    """And each says why."""
    result = typed(
        "--address", "ipc:///tmp/zmqengine-nobody/x/ctl", "--only", "ping", "--answer-timeout", "0.2"
    )
    assert result.exit_code == 1
    assert "no answer to 'D' within 0.2 s" in result.stdout


def no_tail(handler: CommandHandler, *resume: Any, real: Any = CommandHandler._resume) -> Replay:
    """A replay that begins a token late."""
    replay: Replay = real(handler, *resume)
    return replace(replay, row=replace(replay.row, tokens=replay.row.tokens[1:]))


DEFECTS: dict[str, tuple[object, str, object, str, str]] = {
    "a gap at the start": (
        token_log,
        "TokenRow",
        lambda request, index, *rest: TokenRow(request, index + 1, *rest),
        "accepted, then",
        "expected index 0 of r, got 1",
    ),
    "another call": (
        commands, "Done", lambda call, epoch: Done(call + 1, epoch), "K ack", "the answer to 'K' has another call"
    ),
    "no end after an abort": (CommandHandler, "_abort", lambda *_: None, "with abort, once", "each ended by itself"),
    "a replay that lacks a token": (CommandHandler, "_resume", no_tail, "resume", "from 0 on comes something else"),
    "acknowledged and kept": (
        CommandHandler, "_ack", lambda *_: None, "K ack", "expected 'e' unknown_request, got 'u'"
    ),
    "vectors of other texts": (
        FakeTexts, "_vector", lambda texts, request, index: fake_vector([index], 24), "for each text in order",
        "equal texts have other vectors",
    ),
    "the end of an embed": (
        vector_log, "TokenRow", lambda request, index, *rest: TokenRow(request, index + 1, *rest),
        "for each text in order", "expected vector 0, got 1",
    ),
    "images of everybody": (
        Lifecycle, "_cache_scope", lambda *_: "", "who knows a hash", "expected 'e' image_wanted, got 'i'"
    ),
    "any hash": (
        images, "image_hash", lambda *_: bytes(16), "its hash, its grids", "expected 'e' bad_request, got 'o'"
    ),
    "any token id": (
        CommandHandler, "_check_ids", lambda *_: None, "out of range",
        "a token outside the vocabulary is answered with 'i'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_worker_with_a_defect_breaks_the_rule_it_is_about(
    defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, with a line of it broken on purpose."""
    owner, name, broken, only, problem = DEFECTS[defect]
    monkeypatch.setattr(owner, name, broken)
    with FakeWorker(FakeEngineConfig(context_tokens=300, dimensions=24, vision=True)) as worker:
        result = typed("--address", worker.address, "--only", only)
    assert result.exit_code == 1, result.output
    assert problem in result.stdout
