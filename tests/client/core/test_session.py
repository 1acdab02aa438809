"""The core, one promise at a time."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest

from tests.client.core.cores import expected, live, request, session
from tests.client.core.scripted_worker import CONTEXT, LIMITS, MODEL, VOCAB, Held, Network, ScriptedWorker
from zmqengine.errors import (
    BY_CODE,
    AnswerTimeout,
    BadRequest,
    Conflict,
    ContextExceeded,
    DeadlineExceeded,
    Draining,
    Fenced,
    ModelLoadError,
    NotReady,
    Overloaded,
    TooLarge,
    WorkerLost,
)
from zmqengine.protocol.codec import command_decoder, encode
from zmqengine.protocol.messages import (
    Abort,
    Ack,
    Bye,
    End,
    Granted,
    Hello,
    Insert,
    Ping,
    Progress,
    Resume,
    TokenFrame,
    TokenLogprob,
    TokenRow,
)
from zmqengine_client.core import request as request_module
from zmqengine_client.core.calls import ACK_WAIT_S
from zmqengine_client.core.control import ControlCall
from zmqengine_client.core.inserting import end_of, size_refusal
from zmqengine_client.core.phases import Phase
from zmqengine_client.core.request import Request


def sent(network: Network, kind: type) -> list:  # type: ignore[type-arg]
    """The commands of one kind that the worker has received."""
    assert network.worker is not None
    return [command for command in network.worker.received if isinstance(command, kind)]


def publish(network: Network, *rows: TokenRow, n: int = 0) -> None:
    """Put a token frame on out."""
    assert network.worker is not None
    assert network.topic is not None
    network.down["out"].append([network.topic, *encode(TokenFrame(network.worker.epoch, n, list(rows)))])


def start(network: Network, one: Request) -> Request:
    """Start a request and let its insert arrive."""
    network.session.start_request(one, network.now)
    network.settle()
    return one


# --- opening ------------------------------------------------------------------------------------------------


def test_a_client_asks_nothing_until_it_is_needed() -> None:
    """A client that only looks at the status opens no session."""
    core = session()
    core.advance(1.0)
    assert core.outbox.take_actions() == []
    assert core.next_deadline() == inf


def test_it_describes_until_the_worker_is_ready_and_says_hello_then() -> None:
    """Readiness is asked for every 200 ms: neither a flood nor a long wait."""
    worker = ScriptedWorker(state="loading")
    network = Network(session(), worker)
    network.session.start_request(request(), network.now)
    described = 0
    for _ in range(200):
        network.carry_out()
        described += len(network.up["ctl"])
        network.serve("ctl")
        network.deliver("ctl")
        network.wait(0.01)
    assert 9 <= described <= 16
    assert network.connection == 0
    worker.state = "ready"
    network.wait(0.3)
    network.settle()
    assert len(sent(network, Hello)) == 1
    assert network.session.connection.phase is Phase.LIVE


def test_nothing_is_inserted_before_the_subscription_is_granted() -> None:
    """The worker refuses an insert without a subscription; the client waits for `granted`."""
    network = Network(session(), ScriptedWorker())
    network.session.start_request(request(), network.now)
    for _ in range(60):
        network.wait(0.0)
        for channel in ("ctl", "cmd"):
            network.serve(channel)
            network.deliver(channel)
    assert network.topic is not None
    assert network.topic.startswith(b"s/")
    assert len(network.topic) == 35
    assert not sent(network, Insert)
    assert network.worker is not None
    of_another = Granted(network.worker.epoch, "s2")
    network.session.receive("out", [network.topic, *encode(of_another)], network.now)
    assert network.session.connection.phase is Phase.SUBSCRIBING
    network.settle()
    assert len(sent(network, Insert)) == 1


def test_a_worker_that_is_not_there_is_given_up_after_the_connect_timeout() -> None:
    """The error says what to do."""
    network = Network(session(connect_timeout_s=3.0), None)
    one = request()
    network.session.start_request(one, network.now)
    network.wait(2.9)
    assert not one.ended
    network.wait(0.3)
    assert isinstance(one.error, WorkerLost)
    assert "zmqengine worker" in one.error.message


def test_where_no_worker_can_answer_nothing_is_waited_for() -> None:
    """A socket file that is absent says so at once; it took 10 s. A time that was chosen is waited all the same."""
    network = Network(session(is_absent=lambda address: True), None)
    one = request()
    network.session.start_request(one, network.now)
    network.wait(0.0)
    assert isinstance(one.error, WorkerLost)
    assert f"no worker runs at {network.session.config.address}" in one.error.message
    patient = Network(session(is_absent=lambda address: True, connect_timeout_s=3.0), None)
    other = request()
    patient.session.start_request(other, patient.now)
    patient.wait(2.9)
    assert not other.ended


def test_a_worker_that_never_gets_ready_is_given_up_after_the_ready_timeout() -> None:
    """Loading is not absence: it has its own, longer time-out."""
    network = Network(session(connect_timeout_s=3.0, ready_timeout_s=20.0), ScriptedWorker(state="loading"))
    one = request()
    network.session.start_request(one, network.now)
    for _ in range(199):
        network.settle(3)
        network.wait(0.1)
    assert not one.ended
    for _ in range(5):
        network.settle(3)
        network.wait(0.1)
    assert isinstance(one.error, NotReady)
    assert "reading" in one.error.message


def test_a_worker_that_failed_to_load_is_reported_with_its_reason() -> None:
    """The reason is the worker's own sentence."""
    network = Network(session(connect_timeout_s=1.0), ScriptedWorker(state="failed"))
    one = request()
    network.session.start_request(one, network.now)
    for _ in range(12):
        network.settle(3)
        network.wait(0.1)
    assert isinstance(one.error, ModelLoadError)
    assert one.error.message == "no such file"


def test_a_worker_that_says_ready_and_opens_no_session_is_given_up() -> None:
    """Hello is tried again until the answer timeout, then the error says that the worker may hang."""
    network = Network(session(answer_timeout_s=9.0), ScriptedWorker())
    one = request()
    network.session.start_request(one, network.now)
    for _ in range(100):
        network.carry_out()
        network.serve("ctl")
        network.deliver("ctl")
        network.wait(0.1)
        if one.ended:
            break
    assert isinstance(one.error, AnswerTimeout)
    assert 4 <= network.connection <= 6


@pytest.mark.parametrize("code", ["overloaded", "unsupported_protocol", "not_authorized"])
def test_a_refused_hello_is_the_error_of_what_waits(code: str) -> None:
    """No session: the requests that wait for it end with the worker's reason."""
    worker = ScriptedWorker()
    worker.refuse.append((Hello, code))
    network = Network(session(), worker)
    one = start(network, request())
    assert type(one.error) is BY_CODE[code]
    assert network.session.connection.phase is Phase.IDLE


def test_a_draining_worker_refuses_new_requests_by_name() -> None:
    """Draining is an error of its own."""
    worker = ScriptedWorker(state="draining")
    worker.refuse.append((Insert, "draining"))
    one = start(Network(session(), worker), request())
    assert isinstance(one.error, Draining)


# --- commands ------------------------------------------------------------------------------------------------


def test_a_command_without_a_reply_is_sent_again_as_it_was() -> None:
    """Every command is idempotent: same call id, same bytes, until it is answered."""
    network = live()
    one = request()
    network.session.start_request(one, network.now)
    network.carry_out()
    (first,) = network.up["cmd"]
    network.up["cmd"].clear()
    network.wait(1.01)
    (second,) = [frames for frames in network.up["cmd"] if frames[0] == b"ZE1I"]
    assert second == first
    network.settle()
    network.wait(5.0)
    assert len(sent(network, Insert)) == 2
    assert network.session.outbox.counters.command_retries == 1


def test_an_insert_that_is_never_answered_ends_with_a_timeout_and_is_aborted() -> None:
    """The request does not run on for nobody when the worker comes to itself."""
    network = live(answer_timeout_s=5.0)
    one = request()
    network.session.start_request(one, network.now)
    for _ in range(51):
        network.carry_out()
        network.up["cmd"].clear()
        network.wait(0.1)
    assert isinstance(one.error, AnswerTimeout)
    network.settle()
    assert [command.request for command in sent(network, Abort)] == ["r1"]


def test_tokens_that_come_before_accepted_are_taken() -> None:
    """cmd and out are different sockets: the first tokens may overtake the answer to the insert."""
    network = live()
    one = request()
    network.session.start_request(one, network.now)
    network.carry_out()
    network.serve("cmd")
    network.run_pass()
    network.run_pass()
    while network.down["out"]:
        network.deliver("out")
    assert one.tokens == expected(one)[:2]
    assert one.phase.value == "inserting"
    network.wait(0.5)
    network.kill()
    network.worker = ScriptedWorker(epoch=2)
    network.wait(0.01)
    network.settle()
    (again,) = sent(network, Insert)
    assert again.emitted == one.tokens
    assert again.seed == 7


@pytest.mark.parametrize(
    "code",
    ["bad_request", "context_exceeded", "conflict", "never_fits", "overloaded", "draining", "not_ready"],
)
def test_a_refused_insert_is_the_error_of_its_code(code: str) -> None:
    """No retries behind the caller's back: `overloaded` and `not_ready` come with their hint."""
    network = live()
    assert network.worker is not None
    network.worker.refuse.append((Insert, code))
    one = start(network, request())
    assert type(one.error) is BY_CODE[code]
    assert one.error is not None
    assert one.error.retry_after_ms == 20
    assert len(sent(network, Insert)) == 2


def test_the_lease_is_renewed_only_when_nothing_else_was_said() -> None:
    """Pings go out after a third of the lease (30 s here), counted from the last command."""
    network = live()
    network.wait(9.9)
    network.settle()
    assert not sent(network, Ping)
    start(network, request("busy", max_tokens=1))
    network.run_pass()
    network.settle()
    network.wait(ACK_WAIT_S)
    network.settle()
    network.wait(9.9)
    network.settle()
    assert not sent(network, Ping)
    network.wait(0.2)
    network.settle()
    assert len(sent(network, Ping)) == 1


def test_acknowledgements_are_batched() -> None:
    """Many ends in a frame are one ack, sent after `ACK_WAIT_S` or at 64."""
    network = live()
    already = len(sent(network, Ack))
    requests = [request(f"r{number}", max_tokens=1) for number in range(64)]
    for one in requests[:3]:
        start(network, one)
    network.run_pass()
    network.settle()
    assert len(sent(network, Ack)) == already
    network.wait(ACK_WAIT_S)
    network.settle()
    assert [len(ack.requests) for ack in sent(network, Ack)[already:]] == [3]
    for one in requests:
        again = request(f"again-{one.id}", max_tokens=1)
        network.session.start_request(again, network.now)
    network.settle(200)
    network.run_pass()
    network.settle()
    network.wait(0.0)
    network.settle()
    assert [len(ack.requests) for ack in sent(network, Ack)[already:]] == [3, 64]


def test_bye_comes_after_the_last_acknowledgement() -> None:
    """Closing leaves nothing in the worker, and waits for it only so long."""
    network = live()
    one = start(network, request(max_tokens=1))
    running = start(network, request("running", max_tokens=200))
    network.run_pass()
    network.deliver("out")
    assert one.end is not None
    network.session.close(network.now)
    network.settle()
    assert network.worker is not None
    assert [type(command) for command in network.worker.received[-2:]] == [Ack, Bye]
    assert network.worker.sessions == {}
    assert network.session.closed
    assert running.end is not None
    assert running.end.finish == "abort"


def test_closing_does_not_wait_for_a_dead_worker() -> None:
    """Half a second at most."""
    network = live()
    network.kill(notice=False)
    network.session.close(network.now)
    network.wait(0.4)
    assert not network.session.closed
    network.wait(0.2)
    assert network.session.closed


# --- output --------------------------------------------------------------------------------------------------


def test_a_gap_is_resumed_once_and_what_came_after_it_is_kept() -> None:
    """The rows behind a gap are not asked for a second time."""
    network = live()
    one = start(network, request(ignore_eos=True))
    tokens = expected(one)
    assert network.worker is not None
    held = network.worker.requests()["r1"]
    held.tokens[:] = tokens[:4]
    publish(network, TokenRow("r1", 0, tokens[:2]))
    publish(network, TokenRow("r1", 4, tokens[4:5]))
    publish(network, TokenRow("r1", 5, tokens[5:9]))
    for _ in range(3):
        network.deliver("out")
    network.settle()
    assert [resume.from_index for resume in sent(network, Resume)] == [2]
    assert one.tokens == tokens[:9]


def test_a_second_gap_behind_the_first_is_filled_without_a_watermark() -> None:
    """What was kept tells that there is more to ask for, until an answer brings nothing new."""
    network = live()
    one = start(network, request(ignore_eos=True))
    tokens = expected(one)
    assert network.worker is not None
    network.worker.requests()["r1"].tokens[:] = tokens[:6]
    publish(network, TokenRow("r1", 2, tokens[2:4]), TokenRow("r1", 7, tokens[7:9]))
    network.deliver("out")
    network.settle()
    assert one.tokens == tokens[:6]
    assert [resume.from_index for resume in sent(network, Resume)] == [0, 5, 6]
    network.worker.requests()["r1"].tokens[:] = tokens[:9]
    network.down["out"].extend(network.worker.watermarks())
    network.settle()
    assert one.tokens == tokens[:9]


def test_watermarks_that_tell_nothing_new_ask_for_nothing() -> None:
    """Nor does one that does not name a request whose insert was not answered yet."""
    network = live()
    one = start(network, request(ignore_eos=True))
    network.run_pass()
    network.settle()
    assert network.worker is not None
    two = request("r2")
    network.session.start_request(two, network.now)
    network.carry_out()
    inserts = network.up["cmd"].copy()
    network.up["cmd"].clear()
    for _ in range(12):
        network.down["out"].extend(network.worker.watermarks())
        network.deliver("out")
    network.up["cmd"].extendleft(inserts)
    network.settle()
    assert not sent(network, Resume)
    assert [insert.request for insert in sent(network, Insert)] == ["opener", "r1", "r2"]
    assert one.tokens == expected(one)[:1]


def test_an_end_without_tokens_that_was_lost_is_noticed_by_the_watermark() -> None:
    """The tokens are all here, and what the worker did with the request then is not."""
    network = live()
    one = start(network, request(ignore_eos=True))
    network.run_pass()
    network.settle()
    assert network.worker is not None
    network.worker.requests()["r1"].end = End("deadline", prompt_tokens=3)
    network.down["out"].extend(network.worker.watermarks())
    network.settle()
    assert one.end == End("deadline", prompt_tokens=3)
    assert one.tokens == expected(one)[:1]


@pytest.mark.parametrize("told_by", ["frame", "watermark"])
def test_an_end_that_nobody_here_waits_for_is_acknowledged(told_by: str) -> None:
    """The worker keeps it until then."""
    network = live()
    assert network.worker is not None
    (held_session,) = network.worker.sessions.values()
    gone = Insert(0, "gone", network.worker.epoch, [5], max_tokens=1)
    held_session.requests["gone"] = Held(gone, [1], 1, End("length"), end_sent=told_by == "watermark")
    network.down["out"].extend(
        network.worker.watermarks() if told_by == "watermark" else network.worker.run_pass()
    )
    network.settle()
    assert "gone" in network.worker.requests()
    network.wait(ACK_WAIT_S)
    network.settle()
    assert "gone" not in network.worker.requests()


def test_frames_that_were_lost_are_counted() -> None:
    """By the numbers that they have in a session; the first one may have any, and none is lost that comes twice."""
    network = live()
    lost = []
    counters = network.session.outbox.counters
    before = counters.frames_lost
    for n in (1, 2, 2, 5, 4, 5):
        publish(network, n=n)
        network.deliver("out")
        lost.append(counters.frames_lost - before)
    assert lost == [0, 0, 0, 2, 2, 2]


def test_news_of_a_request_is_told_once_until_it_is_looked_at() -> None:
    """However many rows came meanwhile."""
    network = live()
    network.session.outbox.take_changed()
    one = start(network, request(ignore_eos=True))
    for looked in range(2):
        for _ in range(3):
            network.run_pass()
        network.settle()
        assert network.session.outbox.take_changed() == [one], looked


def test_a_request_with_a_bad_option_is_never_sent() -> None:
    """It has ended before it began, and its id is free."""
    network = live()
    one = request()
    one.refuse(BadRequest("no such option"))
    start(network, one)
    assert isinstance(one.error, BadRequest)
    assert [insert.request for insert in sent(network, Insert)] == ["opener"]
    assert start(network, request()).error is None


def test_a_replay_that_is_cut_is_resumed_again() -> None:
    """`more` means: ask again after the last token. The scripted worker gives five at a time."""
    network = live()
    one = start(network, request(ignore_eos=True))
    assert network.worker is not None
    held = network.worker.requests()["r1"]
    held.tokens[:] = expected(one)
    held.end = End("length", prompt_tokens=3)
    publish(network, TokenRow("r1", 19, expected(one)[19:], None, held.end))
    network.settle()
    assert [resume.from_index for resume in sent(network, Resume)] == [0, 5, 10, 15]
    assert one.tokens == expected(one)
    assert one.end == held.end


def test_a_lost_last_frame_is_noticed_by_the_watermark() -> None:
    """Nothing follows the last frame, so only the watermark can tell."""
    network = live()
    one = start(network, request())
    network.drop = 1.0
    for _ in range(25):
        network.run_pass()
    assert one.tokens == []
    assert network.worker is not None
    network.down["out"].extend(network.worker.watermarks())
    network.settle()
    assert one.tokens == expected(one)
    assert one.ended


def test_frames_that_are_lost_in_the_middle_are_noticed_by_the_watermark() -> None:
    """The request still runs, and nothing else of it comes."""
    network = live()
    one = start(network, request())
    network.drop = 1.0
    for _ in range(5):
        network.run_pass()
    assert network.worker is not None
    network.down["out"].extend(network.worker.watermarks())
    network.settle()
    assert one.tokens == expected(one)[:5]
    assert not one.ended


def test_what_comes_beyond_a_gap_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap that is not filled costs a bounded memory; what was not kept is asked for again."""
    monkeypatch.setattr(request_module, "AHEAD_ROWS_MAX", 3)
    network = live()
    one = start(network, request(ignore_eos=True))
    tokens = expected(one)
    assert network.worker is not None
    network.worker.requests()["r1"].tokens[:] = tokens[:10]
    for index in range(1, 10):
        row = TokenRow("r1", index, tokens[index : index + 1])
        frame = encode(TokenFrame(network.worker.epoch, index, [row]))
        network.session.receive("out", [network.topic or b"", *frame], network.now)
    assert [row.first_index for row in one.ahead] == [1, 2, 3]
    network.settle()
    network.down["out"].extend(network.worker.watermarks())
    network.settle()
    assert one.tokens == tokens[:10]


def test_repeated_and_overlapping_rows_add_nothing() -> None:
    """A frame may come twice, or overlap: each token and its log-probability counts once; an end is the last one's."""
    network = live()
    one = start(network, request(ignore_eos=True, logprobs=0))
    tokens = expected(one)
    told = [TokenLogprob(-float(token), []) for token in tokens]
    publish(network, TokenRow("r1", 0, tokens[:5], told[:5]))
    publish(network, TokenRow("r1", 0, tokens[:5], told[:5]))
    publish(network, TokenRow("r1", 3, tokens[3:8], told[3:8]))
    publish(network, TokenRow("r1", 5, tokens[5:6], told[5:6], End("length")))
    network.settle()
    assert not one.ended
    assert one.tokens == tokens[:8]
    assert one.logprobs == told[:8]
    assert network.session.outbox.counters.duplicate_tokens == 8


def test_frames_of_other_topics_and_garbage_are_passed_over() -> None:
    """What is not for this session, or not decodable, changes nothing."""
    network = live()
    one = start(network, request())
    assert network.worker is not None
    body = encode(TokenFrame(network.worker.epoch, 0, [TokenRow("r1", 0, [9])]))
    network.session.receive("out", [b"s/other/", *body], network.now)
    network.session.receive("out", [network.topic or b"", body[0], b"\xc1"], network.now)
    network.session.receive("cmd", [b"ZE1?", b""], network.now)
    network.session.receive("cmd", [b"x"], network.now)
    assert one.tokens == []
    assert network.session.outbox.counters.malformed == 3


def test_progress_of_the_prompt_is_told() -> None:
    """Progress rows are kept as the last known state."""
    network = live()
    one = start(network, request())
    network.run_pass()
    network.settle()
    assert one.progress is not None
    assert (one.progress.done, one.progress.total) == (1, 1)


# --- restarts ------------------------------------------------------------------------------------------------


def restart(network: Network, *, notice: bool = True, **options: object) -> ScriptedWorker:
    """The worker dies and the next one answers."""
    network.kill(notice=notice)
    worker = network.worker = ScriptedWorker(epoch=2, **options)  # type: ignore[arg-type]
    return worker


def run_passes(network: Network, passes: int) -> None:
    """Let the worker make so many tokens of each request, and all that comes of it arrive."""
    for _ in range(passes):
        network.run_pass()
    network.settle()


def settle_with_time(network: Network, seconds: float = 1.0) -> None:
    """Let time pass in small steps."""
    for _ in range(int(seconds / 0.05)):
        network.settle(5)
        network.wait(0.05)


def test_an_unfinished_request_goes_on_in_the_next_worker_with_what_it_has() -> None:
    """Inserted again with `emitted`, the same seed, and its remaining time."""
    network = live()
    one = start(network, request(max_tokens=30, ignore_eos=True, deadline_ms=60_000))
    run_passes(network, 10)
    network.wait(2.0)
    restart(network)
    settle_with_time(network)
    (again,) = sent(network, Insert)
    assert again.emitted == expected(one)[:10]
    assert again.seed == 7
    assert 57_000 <= again.deadline_ms <= 58_000
    assert one.resumed == 1
    kinds = [event.kind for event in network.session.outbox.take_events()]
    assert kinds == ["connected", "lost", "restarted", "connected", "resumed"]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_output_that_was_complete_is_not_inserted_again(finish: str) -> None:
    """The tokens are all here and only the end was lost with the worker: the client knows it."""
    network = live()
    one = start(network, request(max_tokens=5, ignore_eos=finish == "length", prompt=[5]))
    tokens = [3, 0] if finish == "stop" else [1, 2, 3, 4, 5]
    publish(network, TokenRow("r1", 0, tokens))
    network.settle()
    assert not one.ended
    restart(network)
    settle_with_time(network)
    assert one.end is not None
    assert (one.end.finish, one.end.prompt_tokens) == (finish, 1)
    assert not sent(network, Insert)


def test_a_request_whose_stop_token_has_come_is_complete() -> None:
    """`stop_token_ids` count like the model's own end tokens."""
    network = live()
    one = start(network, request(stop_token_ids=[42]))
    publish(network, TokenRow("r1", 0, [1, 42]))
    network.settle()
    restart(network)
    settle_with_time(network)
    assert one.end is not None
    assert one.end.finish == "stop"


@pytest.mark.parametrize(
    ("tokens", "options", "finish"),
    [
        ([], {}, None),
        ([3, 0], {}, "stop"),
        ([0, 3], {}, None),
        ([3, 0], {"ignore_eos": True}, None),
        ([3, 0], {"ignore_eos": True, "stop_token_ids": [0]}, "stop"),
        ([3, 42], {"stop_token_ids": [42]}, "stop"),
        ([3] * 19, {}, None),
        ([3] * 20, {}, "length"),
        ([3] * 19 + [0], {}, "stop"),
    ],
)
def test_an_output_is_whole_where_the_worker_would_have_ended_it(
    tokens: list[int], options: dict[str, Any], finish: str | None
) -> None:
    """And only there: the rest of it would be missing."""
    one = request(**options)
    one.tokens += tokens
    end = end_of(one, frozenset({0}))
    assert (None if end is None else end.finish) == finish


def test_without_resume_a_death_ends_what_ran_and_not_what_comes() -> None:
    """`resume=False`: WorkerLost for what the dead worker held."""
    network = live(resume=False)
    one = start(network, request())
    restart(network)
    network.session.start_request(request("new"), network.now)
    settle_with_time(network)
    assert isinstance(one.error, WorkerLost)
    assert [insert.request for insert in sent(network, Insert)] == ["new"]


@pytest.mark.parametrize(
    ("accepted", "restarted", "goes_on"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_without_resume_only_what_surely_never_ran_is_inserted_again(
    accepted: bool, restarted: bool, goes_on: bool
) -> None:
    """An insert that was lost with its connection may be repeated; of a dead worker nobody knows what it did."""
    network = live(resume=False)
    worker = network.worker
    assert worker is not None
    one = request()
    network.session.start_request(one, network.now)
    network.carry_out()
    if accepted:
        network.settle()
    network.kill()
    worker.sessions.clear()
    network.worker = ScriptedWorker(epoch=2) if restarted else worker
    settle_with_time(network)
    assert isinstance(one.error, WorkerLost) is not goes_on
    run_passes(network, 20)
    assert (one.tokens == expected(one)) is goes_on


def test_another_model_does_not_continue_a_stream() -> None:
    """Half a text from one model and half from another is worse than an error."""
    network = live()
    one = start(network, request())
    restart(network, model=msgspec.structs.replace(MODEL, tokenizer_hash="t2"))
    settle_with_time(network)
    assert isinstance(one.error, WorkerLost)
    assert "another model" in one.error.message


@pytest.mark.parametrize("code", ["overloaded", "not_ready"])
def test_a_restarted_worker_without_room_is_asked_again(code: str) -> None:
    """Everybody comes back at once after a crash: a full queue then is no reason to lose a stream."""
    network = live()
    one = start(network, request())
    worker = restart(network)
    worker.refuse += [(Insert, code)] * 5
    settle_with_time(network)
    assert not one.ended
    assert len(sent(network, Insert)) == 6
    run_passes(network, 20)
    assert one.tokens == expected(one)


def test_a_restarted_worker_that_never_has_room_is_given_up() -> None:
    """Within `worker_lost_timeout_s` of its coming back, however long the request has run before."""
    network = live(worker_lost_timeout_s=3.0)
    one = start(network, request())
    for _ in range(5):
        network.run_pass()
        settle_with_time(network)
    worker = restart(network)
    worker.refuse += [(Insert, "overloaded")] * 10_000
    settle_with_time(network, 2.5)
    assert not one.ended
    settle_with_time(network, 1.5)
    assert isinstance(one.error, WorkerLost)
    assert "no room" in one.error.message


def test_a_request_whose_insert_was_lost_with_the_worker_waits_for_room_as_well() -> None:
    """It is one of those that come back, although nobody ever accepted it."""
    network = live()
    one = request()
    network.session.start_request(one, network.now)
    network.carry_out()
    worker = restart(network)
    worker.refuse += [(Insert, "overloaded")] * 5
    settle_with_time(network)
    assert one.was_accepted
    assert len(sent(network, Insert)) == 6


def test_a_worker_that_forgot_a_request_may_have_no_room_for_a_while() -> None:
    """`worker_lost_timeout_s` counts from when the request came, however long the session has been live."""
    network = live(worker_lost_timeout_s=3.0)
    settle_with_time(network, 5.0)
    one = start(network, request())
    assert network.worker is not None
    for held in network.worker.sessions.values():
        held.requests.clear()
    network.worker.refuse += [(Insert, "overloaded")] * 5
    publish(network, TokenRow("r1", 9, [1]))
    settle_with_time(network)
    assert len(sent(network, Insert)) == 8
    run_passes(network, 20)
    assert one.tokens == expected(one)


def test_what_a_restarted_worker_refuses_for_good_ends_there() -> None:
    """Only for want of room is it asked again."""
    network = live()
    one = start(network, request())
    worker = restart(network)
    worker.refuse.append((Insert, "never_fits"))
    settle_with_time(network)
    assert type(one.error) is BY_CODE["never_fits"]
    assert len(sent(network, Insert)) == 1


def test_a_deadline_passes_also_while_a_worker_has_no_room() -> None:
    """The worker cannot tell: it holds no such request."""
    network = live()
    one = start(network, request(deadline_ms=2000))
    worker = restart(network)
    worker.refuse += [(Insert, "overloaded")] * 10_000
    settle_with_time(network, 1.5)
    assert not one.ended
    settle_with_time(network)
    assert isinstance(one.error, DeadlineExceeded)


def test_each_request_is_asked_again_when_its_own_hint_says() -> None:
    """The long wait of one holds up no other; without a hint it is a quarter of a second."""
    network = live()
    for name in ("r1", "r2", "r3"):
        start(network, request(name))
    worker = restart(network)
    worker.retry_after_ms = {"r1": None, "r2": 400, "r3": 3000}
    worker.refuse += [(Insert, "overloaded")] * 3
    times: dict[str, list[float]] = {}
    for _ in range(100):
        network.settle(5)
        for insert in sent(network, Insert)[sum(map(len, times.values())) :]:
            times.setdefault(insert.request, []).append(network.now)
        network.wait(0.05)
    for name, wait_s in (("r1", 0.25), ("r2", 0.4), ("r3", 3.0)):
        first, second = times[name]
        assert wait_s <= second - first < wait_s + 0.1


def test_an_abort_wins_over_a_refusal_that_is_on_its_way() -> None:
    """Whoever has given a request up is told of no error."""
    network = live()
    assert network.worker is not None
    network.worker.refuse.append((Insert, "overloaded"))
    one = request()
    network.session.start_request(one, network.now)
    network.session.abort_request(one, network.now)
    assert not one.ended
    network.settle()
    assert one.error is None
    assert one.end is not None
    assert one.end.finish == "abort"


def test_a_worker_that_does_not_come_back_is_given_up() -> None:
    """Within `worker_lost_timeout_s`, with what to do."""
    network = live(worker_lost_timeout_s=3.0)
    one = start(network, request())
    network.kill()
    settle_with_time(network, 2.9)
    assert not one.ended
    settle_with_time(network, 0.4)
    assert isinstance(one.error, WorkerLost)
    assert "zmqengine worker" in one.error.message


def test_patience_does_not_run_while_the_worker_loads_and_gets_further() -> None:
    """A large model takes longer to load than `worker_lost_timeout_s`: streams wait for it and go on."""
    network = live(worker_lost_timeout_s=3.0)
    one = start(network, request())
    worker = restart(network)
    worker.state = "loading"
    for percent in range(10):
        worker.progress = Progress("reading weights", percent / 10)
        settle_with_time(network, 2.0)
        assert one.error is None, one.error
    worker.state = "ready"
    settle_with_time(network, 2.0)
    run_passes(network, 20)
    assert one.tokens == expected(one)


def test_a_worker_that_stays_at_one_point_of_loading_is_given_up() -> None:
    """Within `worker_lost_timeout_s` of its last progress, and the error says what it hangs at."""
    network = live(worker_lost_timeout_s=3.0)
    one = start(network, request())
    worker = restart(network)
    worker.state = "loading"
    worker.progress = Progress("reading weights", 0.3)
    settle_with_time(network, 6.0)
    assert isinstance(one.error, WorkerLost)
    assert "reading weights" in one.error.message


@pytest.mark.parametrize("code", ["stale_epoch", "unknown_session", "not_subscribed"])
def test_a_session_the_worker_does_not_know_is_opened_again(code: str) -> None:
    """smg #1427 review: never silence. The refused command is repeated in the new session."""
    network = live()
    assert network.worker is not None
    network.worker.refuse.append((Insert, code))
    one = start(network, request())
    settle_with_time(network)
    assert len(sent(network, Hello)) == 2
    run_passes(network, 20)
    assert one.tokens == expected(one)


def test_a_forgotten_request_is_inserted_again() -> None:
    """`unknown_request` to a resume: the worker lives but has dropped it."""
    network = live()
    one = start(network, request(ignore_eos=True))
    network.run_pass()
    network.run_pass()
    network.settle()
    assert network.worker is not None
    (held_session,) = network.worker.sessions.values()
    del held_session.requests["r1"]
    publish(network, TokenRow("r1", 10, [1]))
    network.settle()
    assert sent(network, Insert)[-1].emitted == expected(one)[:2]
    run_passes(network, 20)
    assert one.tokens == expected(one)


def test_a_change_of_epoch_is_noticed_on_each_socket() -> None:
    """A reply, a frame or a description with another epoch means another worker."""
    for channel in ("cmd", "out", "ctl"):
        network = live()
        one = start(network, request())
        network.kill(notice=False)
        assert network.topic is not None
        worker = network.worker = ScriptedWorker(epoch=2)
        if channel == "out":
            frame = encode(TokenFrame(worker.epoch, 0))
            network.session.receive("out", [network.topic, *frame], network.now)
        elif channel == "cmd":
            network.session.abort_request(start(network, request("other")), network.now)
        else:
            network.session.start_request(request("other"), network.now)
            network.carry_out()
            network.up["cmd"].clear()
            network.wait(1.0)
            network.up["cmd"].clear()
            network.wait(2.0)
            network.up["cmd"].clear()
        settle_with_time(network)
        assert "r1" in [insert.request for insert in sent(network, Insert)], channel
        assert one.resumed == 1


def test_an_answer_with_another_epoch_is_the_end_of_the_session() -> None:
    """Though it answers a call of ours: whoever gives it holds none of our requests."""
    network = live()
    one = start(network, request())
    assert network.worker is not None
    network.worker.epoch = (2).to_bytes(8, "big")
    network.session.abort_request(one, network.now)
    network.carry_out()
    network.serve("cmd")
    network.deliver("cmd")
    assert network.session.connection.phase is not Phase.LIVE


def test_a_session_that_was_taken_over_is_final() -> None:
    """`fenced` ends everything, now and later."""
    network = live()
    one = start(network, request())
    assert network.worker is not None
    network.worker.refuse.append((Insert, "fenced"))
    two = start(network, request("r2"))
    three = start(network, request("r3"))
    assert all(isinstance(lost.error, Fenced) for lost in (one, two, three))
    assert network.session.connection.phase is Phase.FENCED


def test_what_an_earlier_life_left_is_aborted() -> None:
    """A front-end that restarts with its old secret takes over, and nobody waits for what still runs."""
    network = live()
    start(network, request("old", max_tokens=200))
    worker = network.worker
    second = Network(session(), worker)
    second.connection = 10
    one = start(second, request("new", max_tokens=1))
    second.run_pass()
    settle_with_time(second)
    assert one.tokens == expected(one)
    assert worker is not None
    assert worker.requests() == {}


# --- silence -------------------------------------------------------------------------------------------------


def test_a_worker_that_falls_silent_is_given_up_in_time() -> None:
    """A frozen worker keeps its connections: only the silence tells."""
    network = live(worker_lost_timeout_s=20.0)
    one = start(network, request())
    network.worker = None
    settle_with_time(network, 19.0)
    assert not one.ended
    settle_with_time(network, 3.0)
    assert isinstance(one.error, WorkerLost)


@pytest.mark.parametrize("silent_s", [0.0, 7.0])
def test_a_client_that_was_stopped_asks_before_it_gives_a_worker_up(silent_s: float) -> None:
    """SIGSTOP for an hour: its timers come before what waits in its sockets. Streams go on, also where it had asked."""
    network = live(worker_lost_timeout_s=20.0)
    one = start(network, request())
    network.run_pass()
    worker, network.worker = network.worker, None
    settle_with_time(network, silent_s)
    network.worker = worker
    network.now += 3600
    for _ in range(3):
        network.session.advance(network.now)
        network.carry_out()
        network.now += 0.1
    assert not one.ended
    run_passes(network, 30)
    assert one.tokens == expected(one)


def test_an_output_socket_that_went_dead_is_made_anew() -> None:
    """Commands are answered and nothing is published: the subscription is lost, not the worker."""
    network = live()
    one = start(network, request())
    network.topic = None
    for _ in range(400):
        network.run_pass()
        network.settle(2)
        network.wait(0.05)
    assert one.tokens == expected(one)
    assert network.session.outbox.counters.reconnects == 1
    assert one.resumed == 0


# --- checks before sending -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prompt": [1] * CONTEXT}, ContextExceeded),
        ({"prompt": [1] * (CONTEXT - 5), "max_tokens": 6}, ContextExceeded),
        ({"prompt": [1, VOCAB]}, BadRequest),
        ({"stop_token_ids": [VOCAB]}, BadRequest),
        ({"logit_bias": {VOCAB: 1.0}}, BadRequest),
        ({"min_tokens": 21, "max_tokens": 20}, BadRequest),
        ({"prediction": [VOCAB]}, BadRequest),
    ],
)
def test_bounds_are_checked_before_anything_is_sent(options: dict, error: type) -> None:  # type: ignore[type-arg]
    """mlx-lm 0.32.2: an id outside the vocabulary crashes the process. It does not even leave the client."""
    network = live()
    already = len(sent(network, Insert))
    one = start(network, request(**options))
    assert type(one.error) is error
    assert len(sent(network, Insert)) == already


def test_a_request_over_the_frame_limit_is_not_sent() -> None:
    """TooLarge names both sizes."""
    network = live()
    bias = dict.fromkeys(range(VOCAB), 99.123456789)
    one = start(network, request(logit_bias=bias, prompt=[300] * 299, max_tokens=1))
    assert one.error is None
    assert network.session.connection.limits is not None
    network.session.connection.limits = msgspec.structs.replace(LIMITS, frame_bytes_max=1024)
    two = start(network, request("r2", logit_bias=bias))
    assert isinstance(two.error, TooLarge)
    assert "1024" in two.error.message
    limits = network.session.connection.limits
    assert size_refusal(bytes(1024), limits) is None
    assert size_refusal(bytes(1025), limits) is not None


def test_max_tokens_none_is_all_that_the_context_leaves() -> None:
    """Known only when the worker has told its limits."""
    network = live()
    one = start(network, request(prompt=[1] * 100, max_tokens=None))
    assert one.max_tokens == CONTEXT - 100
    assert sent(network, Insert)[-1].max_tokens == CONTEXT - 100


@pytest.mark.parametrize(("max_tokens", "said"), [(None, None), (7, 7)])
def test_an_open_end_is_left_to_a_worker_that_takes_one(max_tokens: int | None, said: int | None) -> None:
    """And a number that was given is always sent."""
    network = live()
    network.session.connection.limits = msgspec.structs.replace(LIMITS, open_max_tokens=True)
    one = request(prompt=[1] * 100, max_tokens=max_tokens)
    network.session.start_request(one, network.now)
    network.carry_out()
    insert = command_decoder().decode(network.up["cmd"].pop())
    assert isinstance(insert, Insert)
    assert insert.max_tokens == said
    assert one.max_tokens == (max_tokens or CONTEXT - 100)


@pytest.mark.parametrize(
    ("options", "able"),
    [
        ({"regex": "a*"}, {"constraints": True}),
        ({"cache_scope": "key"}, {"cache_scope": "session"}),
        ({"pin": True}, {"cache_scope": "session"}),
        ({"speculate": False}, {"speculation": True}),
        ({"prefill_keep": 0.5}, {"prefill_keep": True}),
    ],
)
def test_an_older_worker_is_not_asked_for_what_it_cannot_do(
    options: dict[str, Any], able: dict[str, Any]
) -> None:
    """It would refuse the field as unknown; one that says that it can is asked."""
    network = live()
    already = len(sent(network, Insert))
    assert isinstance(start(network, request(**options)).error, BadRequest)
    network.session.connection.limits = msgspec.structs.replace(LIMITS, **able)
    assert start(network, request("r2", **options)).error is None
    assert [insert.request for insert in sent(network, Insert)[already:]] == ["r2"]


def test_an_id_that_is_in_use_is_a_conflict_and_can_be_used_again_after_the_end() -> None:
    """The acknowledgement goes out before the second insert."""
    network = live()
    one = start(network, request(max_tokens=1))
    two = start(network, request(max_tokens=2))
    assert isinstance(two.error, Conflict)
    network.run_pass()
    network.deliver("out")
    assert one.end is not None
    three = start(network, request(max_tokens=2))
    assert three.error is None
    network.run_pass()
    network.run_pass()
    network.settle()
    assert three.tokens == expected(three)


def test_a_deadline_passes_also_without_a_worker() -> None:
    """deadline_ms counts from the call, whatever the connection does."""
    network = Network(session(connect_timeout_s=60.0), None)
    one = request(deadline_ms=500)
    network.session.start_request(one, network.now)
    network.wait(0.4)
    assert not one.ended
    network.wait(0.2)
    assert isinstance(one.error, DeadlineExceeded)
    assert "no session with a worker" in str(one.error)


# --- ctl -----------------------------------------------------------------------------------------------------


def test_waiting_until_ready_ends_when_the_worker_is() -> None:
    """`wait_ready` needs no session."""
    worker = ScriptedWorker(state="loading")
    network = Network(session(), worker)
    call = ControlCall(None)
    network.session.start_control(call, network.now)
    settle_with_time(network)
    assert not call.done
    worker.state = "ready"
    settle_with_time(network, 0.5)
    assert call.result is not None
    assert network.connection == 0
    assert network.session.next_deadline() == inf


def test_a_control_call_without_an_answer_ends_in_an_error() -> None:
    """WorkerLost when nobody ever answered; AnswerTimeout when somebody is there and does not."""
    network = Network(session(connect_timeout_s=2.0, answer_timeout_s=4.0), None)
    call = ControlCall(Ping)
    network.session.start_control(call, network.now)
    settle_with_time(network, 2.2)
    assert isinstance(call.error, WorkerLost)
    network.worker = ScriptedWorker()
    network.session.connected("ctl")
    settle_with_time(network, 0.2)
    network.worker = None
    call = ControlCall(Ping)
    network.session.start_control(call, network.now)
    settle_with_time(network, 4.2)
    assert isinstance(call.error, AnswerTimeout)


def test_an_overloaded_error_keeps_its_hint() -> None:
    """retry_after_ms reaches the caller."""
    network = live()
    assert network.worker is not None
    network.worker.refuse.append((Insert, "overloaded"))
    one = start(network, request())
    assert isinstance(one.error, Overloaded)
    assert one.error.retry_after_ms == 20


def test_a_request_that_no_watermark_names_any_more_is_asked_for() -> None:
    """The worker forgot it without a word: it is inserted again, not waited for."""
    network = live()
    one = start(network, request(ignore_eos=True))
    other = start(network, request("other", max_tokens=200, ignore_eos=True))
    network.run_pass()
    network.settle()
    worker = network.worker
    assert worker is not None
    (held_session,) = worker.sessions.values()
    del held_session.requests["r1"]
    for _ in range(5):
        network.down["out"].extend(worker.watermarks())
        network.settle()
    assert sent(network, Insert)[-1].request == "r1"
    run_passes(network, 30)
    assert one.tokens == expected(one)
    assert not other.ended


def test_a_worker_that_restarts_between_describe_and_hello_is_described_again() -> None:
    """The model may be another one: what was described belongs to the worker before."""
    network = Network(session(), ScriptedWorker())
    one = request()
    network.session.start_request(one, network.now)
    network.carry_out()
    network.serve("ctl")
    network.deliver("ctl")
    assert network.session.connection.phase is Phase.HELLO
    other = msgspec.structs.replace(MODEL, name="other")
    network.worker = ScriptedWorker(epoch=2, model=other)
    settle_with_time(network)
    assert len(sent(network, Hello)) == 2
    assert network.session.connection.model == other
    assert len(sent(network, Insert)) == 1
