"""Token log: the output of one request, kept until the front-end acknowledges it, to replay its stream."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zmqengine.engine.interface import TokenLogprobs
from zmqengine.protocol.messages import End, TokenLogprob, TokenRow

LOGPROB_MIN = -9999.0
"""Value sent for minus infinity, as in OpenAI's API."""
# Estimated bytes in memory: a token, its log-probability, and each top alternative.
_TOKEN_BYTES, _LOGPROB_BYTES, _TOP_BYTES = 4, 120, 130
# The same on the wire in msgpack: an int of 32 bits with its tag; an array of an int, a float of 64 bits and its tag.
_WIRE_TOKEN_BYTES, _WIRE_LOGPROB_BYTES = 5, 15


class TokenLog:
    """Output tokens by index; `sent`: index of the first token that was not sent yet.

    `emitted` are output tokens of an earlier epoch: they have indices, but are never sent. `logprobs` is the number of
    log-probabilities beside the token's own, or None for none at all. `weight` is the size of an entry in a frame, in
    tokens. `kept_from` is the index from which all log-probabilities are kept.
    """

    __slots__ = ("_first", "_logprobs", "kept_from", "nbytes", "sent", "tokens", "weight")

    def __init__(self, emitted: Sequence[int], *, logprobs: int | None) -> None:
        self.tokens = array("i", emitted)
        # Index of the first of `_logprobs`.
        self._first = len(emitted)
        self._logprobs: list[TokenLogprobs | None] | None = None if logprobs is None else []
        self.weight = 1 if logprobs is None else 2 + logprobs
        self.kept_from = 0
        self.sent = len(emitted)
        self.nbytes = _TOKEN_BYTES * len(emitted)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> int:
        """Append a token; returns an estimate of the bytes by which the log grew."""
        self.tokens.append(token)
        grown = _TOKEN_BYTES
        if self._logprobs is not None:
            self._logprobs.append(_finite(logprobs))
            grown += _logprob_bytes(logprobs)
        self.nbytes += grown
        return grown

    def forget_sent(self) -> int:
        """Drop the log-probabilities of tokens that were sent; returns an estimate of the bytes."""
        if self._logprobs is None or self.sent <= self._first:
            return 0
        dropped = self._logprobs[: self.sent - self._first]
        del self._logprobs[: len(dropped)]
        self.kept_from = self._first = self.sent
        shrunk = sum(map(_logprob_bytes, dropped))
        self.nbytes -= shrunk
        return shrunk

    def stop_within(self, start: int, bytes_max: int) -> int:
        """End of the tokens from `start` that fit in `bytes_max` on the wire; at least one token, if there is one."""
        if self._logprobs is None:
            return min(len(self.tokens), start + max(1, bytes_max // _WIRE_TOKEN_BYTES))
        stop, left = start, bytes_max
        while stop < len(self.tokens):
            entry = self._logprobs[stop - self._first] if stop >= self._first else None
            left -= _WIRE_TOKEN_BYTES + _WIRE_LOGPROB_BYTES * (1 + (len(entry.top) if entry else 0))
            if left < 0 and stop > start:
                break
            stop += 1
        return stop

    def row(self, request_id: str, start: int, stop: int, end: End | None) -> TokenRow:
        """Tokens [start, stop) in the wire format."""
        return TokenRow(request_id, start, *self.slice(start, stop), end)

    def slice(self, start: int, stop: int) -> tuple[list[int], list[TokenLogprob] | None]:
        """Tokens [start, stop) and their log-probabilities in the wire format."""
        tokens = self.tokens[start:stop].tolist()
        if self._logprobs is None:
            return tokens, None
        known = self._logprobs[max(0, start - self._first) : max(0, stop - self._first)]
        missing = len(tokens) - len(known)
        wire = [_no_logprob] * missing
        wire += [TokenLogprob(entry.logprob, entry.top) if entry else _no_logprob for entry in known]
        return tokens, wire


def _logprob_bytes(logprobs: TokenLogprobs | None) -> int:
    return _LOGPROB_BYTES + (_TOP_BYTES * len(logprobs.top) if logprobs else 0)


def _finite(logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
    """Replace the minus infinity of an impossible token, which not every receiver can read in a frame."""
    if logprobs is None:
        return None
    if logprobs.logprob >= LOGPROB_MIN and all(logprob >= LOGPROB_MIN for _, logprob in logprobs.top):
        return logprobs
    return logprobs._replace(
        logprob=max(logprobs.logprob, LOGPROB_MIN),
        top=[(token, max(logprob, LOGPROB_MIN)) for token, logprob in logprobs.top],
    )


# Tokens of an earlier epoch have no log-probabilities.
_no_logprob = TokenLogprob(0.0, [])
