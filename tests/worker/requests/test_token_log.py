"""What a token log gives for the wire."""

from __future__ import annotations

from math import inf

from zmqengine.engine.interface import TokenLogprobs
from zmqengine.protocol.messages import TokenLogprob
from zmqengine.worker.requests.token_log import LOGPROB_MIN, TokenLog


def test_no_logprob_on_the_wire_is_infinite() -> None:
    """An impossible token has minus infinity, which is malformed: a strict receiver would drop the frame."""
    log = TokenLog([], logprobs=20)
    log.append(3, TokenLogprobs(-inf, [(3, -0.5), (4, -inf)]))
    log.append(4, TokenLogprobs(-0.25, [(4, -0.25)]))
    _, logprobs = log.slice(0, 2)
    assert logprobs is not None
    assert (logprobs[0].logprob, logprobs[0].top) == (LOGPROB_MIN, [(3, -0.5), (4, LOGPROB_MIN)])
    assert (logprobs[1].logprob, logprobs[1].top) == (-0.25, [(4, -0.25)])


def test_a_replay_takes_what_fits_and_at_least_one() -> None:
    """Bounds in bytes, also where some tokens have log-probabilities and others, of an earlier epoch, have none."""
    log = TokenLog([1] * 100, logprobs=20)
    for _ in range(100):
        log.append(2, TokenLogprobs(-1.0, [(token, -1.0) for token in range(20)]))
    assert log.stop_within(0, 1) == 1
    assert log.stop_within(0, 2000) == 100
    assert log.stop_within(100, 3300) == 110
    assert log.stop_within(199, 1 << 20) == 200
    assert log.stop_within(200, 1 << 20) == 200
    plain = TokenLog([1] * 1000, logprobs=None)
    assert plain.stop_within(0, 500) == 100
    assert plain.stop_within(990, 500) == 1000


def test_what_was_sent_may_lose_its_log_probabilities() -> None:
    """Tokens stay, later log-probabilities keep their index, and the bytes are given back."""
    log = TokenLog([1] * 5, logprobs=1)
    for number in range(10):
        log.append(number, TokenLogprobs(-float(number), [(number, -1.0)]))
    whole = log.nbytes
    assert log.forget_sent() == 0
    log.sent = 12
    freed = log.forget_sent()
    assert log.nbytes == whole - freed < whole // 2
    assert (log.kept_from, log.forget_sent()) == (12, 0)
    tokens, logprobs = log.slice(12, 15)
    assert logprobs is not None
    assert (tokens, [entry.logprob for entry in logprobs]) == ([7, 8, 9], [-7.0, -8.0, -9.0])
    assert log.stop_within(12, 1) == 13
    log.append(10, TokenLogprobs(-10.0, []))
    assert log.slice(15, 16) == ([10], [TokenLogprob(-10.0, [])])
