"""Every error of zmqengine, with the code it has on the wire.

ZmqEngineError
├── RequestError          the request is at fault: sending it again as it is will fail again
│   ├── BadRequest        bad_request          a field is missing, malformed, unknown or out of range
│   ├── TooLarge          too_large            the message is over the worker's frame limit
│   ├── ContextExceeded   context_exceeded     prompt + max_tokens do not fit the model's context
│   ├── Conflict          conflict             the request id is in use with other contents
│   ├── UnknownRequest    unknown_request      the worker holds no such request
│   ├── UnknownModel      unknown_model        the launcher offers no model of this name
│   ├── ImageWanted       image_wanted         the worker does not hold an image that the request names
│   ├── ConstraintFailed  constraint_failed    the output met a limit of its constraint and is not whole
│   └── NeverFits         never_fits           the request needs more memory than an empty worker has
├── SessionError          the session is at fault: say hello again
│   ├── StaleEpoch        stale_epoch          the worker has restarted since
│   ├── UnknownSession    unknown_session      this connection has no session
│   ├── NotSubscribed     not_subscribed       the session has no granted subscription yet
│   ├── Fenced            fenced               another connection has taken the session over
│   └── UnsupportedProtocol  unsupported_protocol  no protocol version in common
├── NotAuthorized         not_authorized       the key may not do this
├── Unavailable           nothing is wrong with the request: try again later
│   ├── Overloaded        overloaded           the queue is full; retry after `retry_after_ms`
│   ├── NotReady          not_ready            the model is still loading
│   ├── Draining          draining             the worker takes no new requests
│   └── WorkerLost        worker_lost          the worker died or cannot be reached
├── GenerationFailed      the request was accepted and ended early
│   ├── RowFailed         error                generating this request failed in the engine
│   ├── DeadlineExceeded  deadline             deadline_ms passed before the last token
│   ├── LeaseExpired      lease                the front-end was silent for longer than its lease
│   ├── SlowConsumer      slow_consumer        the front-end fell behind by more than its budget
│   └── ShutDown          shutdown             the worker stopped before the last token
├── Aborted               aborted              the request was aborted before it was inserted
├── InternalError         internal             the worker failed at this command; its log says how
├── AnswerTimeout         timeout              no answer in time; the worker may be busy or gone
├── ConfigError           config               an option or address that cannot work
└── ModelLoadError        model_load           the model cannot be loaded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class ZmqEngineError(Exception):
    """The root of all our errors. `str()` is one sentence for a person, `code` one word for a program."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.completion: object | None = None
        """The partial `Completion` of a stream that failed."""


class RequestError(ZmqEngineError):
    """The request is at fault; sending it again as it is will fail again."""

    code = "bad_request"


class BadRequest(RequestError):
    """A field is missing, malformed, unknown or out of range; the message names it."""


class TooLarge(RequestError):
    """The message is over the worker's frame limit; `limits.frame_bytes_max` says how long it may be."""

    code = "too_large"


class ContextExceeded(RequestError):
    """prompt + max_tokens do not fit the model's context; shorten one of them."""

    code = "context_exceeded"

    def __init__(self, message: str, *, text: int | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.text = text
        """Index of the text to embed that is too long; None for a prompt, and where a worker refuses it."""


class Conflict(RequestError):
    """The request id is in use with other contents; choose another id."""

    code = "conflict"


class UnknownRequest(RequestError):
    """The worker holds no such request: it was acknowledged, its session ended, or it never came."""

    code = "unknown_request"


class UnknownModel(RequestError):
    """The launcher offers no model of this name; the message names similar ones."""

    code = "unknown_model"


class ImageWanted(RequestError):
    """The worker does not hold an image that the request names; send its pixels, then the request again."""

    code = "image_wanted"

    def __init__(
        self, message: str, wanted: Sequence[bytes] = (), *, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.wanted = list(wanted)
        """Hashes of the images."""


class ConstraintFailed(RequestError):
    """The output met a limit of its constraint and is not whole; simplify the constraint or shorten its texts."""

    code = "constraint_failed"


class NeverFits(RequestError):
    """The request needs more memory than an empty worker has; lower max_tokens or raise --memory-limit."""

    code = "never_fits"


class SessionError(ZmqEngineError):
    """The session is at fault; say hello again."""

    code = "unknown_session"


class StaleEpoch(SessionError):
    """The worker has restarted since; say hello again and insert unfinished requests with `emitted`."""

    code = "stale_epoch"


class UnknownSession(SessionError):
    """This connection has no session; say hello first."""


class NotSubscribed(SessionError):
    """The session has no granted subscription; subscribe to its topic and wait for `granted`."""

    code = "not_subscribed"


class Fenced(SessionError):
    """Another connection has taken the session over; this one can do nothing more with it."""

    code = "fenced"


class UnsupportedProtocol(SessionError):
    """No protocol version in common; update the older side."""

    code = "unsupported_protocol"


class NotAuthorized(ZmqEngineError):
    """The key may not do this; ask the worker's operator."""

    code = "not_authorized"


class Unavailable(ZmqEngineError):
    """Nothing is wrong with the request; try again after `retry_after_ms`."""

    code = "not_ready"


class Overloaded(Unavailable):
    """The queue is full; try again after `retry_after_ms`."""

    code = "overloaded"


class NotReady(Unavailable):
    """The model is still loading; `describe` tells how far it is."""


class Draining(Unavailable):
    """The worker takes no new requests because it is about to stop; use another one or wait for the next."""

    code = "draining"


class WorkerLost(Unavailable):
    """The worker died or cannot be reached; start it, or wait for its supervisor, then try again."""

    code = "worker_lost"


class GenerationFailed(ZmqEngineError):
    """The request was accepted and ended early; the tokens so far are good."""

    code = "error"


class RowFailed(GenerationFailed):
    """Generating this request failed in the engine; other requests went on."""


class DeadlineExceeded(GenerationFailed):
    """deadline_ms passed before the last token."""

    code = "deadline"


class LeaseExpired(GenerationFailed):
    """The front-end was silent for longer than its lease."""

    code = "lease"


class SlowConsumer(GenerationFailed):
    """The front-end fell behind by more than its budget; read faster or open more sessions."""

    code = "slow_consumer"


class ShutDown(GenerationFailed):
    """The worker stopped before the last token; insert again elsewhere with `emitted`."""

    code = "shutdown"


class Aborted(ZmqEngineError):
    """The request was aborted before it was inserted."""

    code = "aborted"


class InternalError(ZmqEngineError):
    """The worker failed at this command, for a reason of its own; its log says how, and it serves on."""

    code = "internal"


class AnswerTimeout(ZmqEngineError):
    """No answer in time; the worker may be busy or gone."""

    code = "timeout"


class ConfigError(ZmqEngineError):
    """An option or address that cannot work; the message says what to change."""

    code = "config"


class ModelLoadError(ZmqEngineError):
    """The model cannot be loaded; the message says why, on one line."""

    code = "model_load"


def _subclasses(root: type[ZmqEngineError]) -> list[type[ZmqEngineError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


# The most derived class of a code wins: bad_request is BadRequest, not RequestError.
BY_CODE: dict[str, type[ZmqEngineError]] = {cls.code: cls for cls in _subclasses(ZmqEngineError)}


def from_code(code: str, message: str, *, retry_after_ms: int | None = None) -> ZmqEngineError:
    """The error a wire code stands for; a code of a newer version is a plain `ZmqEngineError`."""
    error = BY_CODE.get(code, ZmqEngineError)(message, retry_after_ms=retry_after_ms)
    if code not in BY_CODE:
        error.code = code  # type: ignore[misc]
    return error
