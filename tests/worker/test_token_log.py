"""What a token log gives for the wire."""

from __future__ import annotations

from math import inf

from zmqengine.engine.interface import TokenLogprobs
from zmqengine.worker.requests.token_log import LOGPROB_MIN, TokenLog


def test_no_logprob_on_the_wire_is_infinite() -> None:
    """An impossible token has minus infinity, which is malformed: a strict receiver would drop the frame."""
    log = TokenLog([], with_logprobs=True)
    log.append(3, TokenLogprobs(-inf, [(3, -0.5), (4, -inf)]))
    log.append(4, TokenLogprobs(-0.25, [(4, -0.25)]))
    _, logprobs = log.slice(0, 2)
    assert logprobs is not None
    assert (logprobs[0].logprob, logprobs[0].top) == (LOGPROB_MIN, [(3, -0.5), (4, LOGPROB_MIN)])
    assert (logprobs[1].logprob, logprobs[1].top) == (-0.25, [(4, -0.25)])


def test_a_replay_takes_what_fits_and_at_least_one() -> None:
    """Bounds in bytes, also where some tokens have log-probabilities and others, of an earlier epoch, have none."""
    log = TokenLog([1] * 100, with_logprobs=True)
    for _ in range(100):
        log.append(2, TokenLogprobs(-1.0, [(token, -1.0) for token in range(20)]))
    assert log.stop_within(0, 1) == 1
    assert log.stop_within(0, 2000) == 100
    assert log.stop_within(100, 3300) == 110
    assert log.stop_within(199, 1 << 20) == 200
    assert log.stop_within(200, 1 << 20) == 200
    plain = TokenLog([1] * 1000, with_logprobs=False)
    assert plain.stop_within(0, 500) == 100
    assert plain.stop_within(990, 500) == 1000
