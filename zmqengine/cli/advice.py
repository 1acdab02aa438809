"""Error messages for users: one line, with advice on what to do next."""

from __future__ import annotations

from zmqengine import errors
from zmqengine.errors import ZmqEngineError
from zmqengine.option import bound_in_words

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_ADVICE: tuple[tuple[type[ZmqEngineError], str], ...] = (
    (errors.ConfigError, ""),
    (errors.ModelLoadError, "check --model: pico, a directory or a hub id"),
    (errors.WorkerLost, "start a worker with `zmqengine worker`, or say which with --worker"),
    (errors.AnswerTimeout, "see what the worker does with `zmqengine status`"),
    (errors.ContextExceeded, "shorten the prompt or lower --max-tokens"),
    (errors.NeverFits, "lower --max-tokens or give the worker a higher --memory-limit"),
    (errors.NotAuthorized, "give a key that the worker knows"),
    (errors.UnsupportedProtocol, "update the older of the two"),
    (errors.Draining, "use another worker, or start it again"),
    (errors.NotReady, "try again when `zmqengine status` says ready"),
    (errors.Overloaded, "try again later"),
    (errors.Fenced, "start again"),
    (errors.SlowConsumer, "read faster, or ask for less"),
    (errors.ShutDown, "start the worker, then try again"),
    (errors.DeadlineExceeded, "give it more time, or ask for fewer tokens"),
    (errors.InternalError, "the worker's log says why; please report it"),
    (errors.ConstraintFailed, "make the schema or grammar simpler, or its texts shorter"),
    (errors.RowFailed, "the worker's log says why"),
)


def one_line(error: ZmqEngineError) -> str:
    """The message of an error, with advice unless it already says what to do."""
    message = error.message.strip().rstrip(".")
    if "zmqengine " in message:
        return message
    bound = bound_in_words(message)
    if bound is not None and not isinstance(error, errors.ConfigError):
        # The options of a command have the names of the request's fields.
        return f"--{bound[0].replace('_', '-')} {bound[1]}"
    advice = next((advice for kind, advice in _ADVICE if isinstance(error, kind)), "")
    if error.retry_after_ms:
        advice = f"try again in {max(1, round(error.retry_after_ms / 1000))} s"
    return f"{message}; {advice}" if advice else message


def exit_code_of(error: ZmqEngineError) -> int:
    """2 for an option that cannot work, 1 for everything else."""
    return EXIT_USAGE if isinstance(error, errors.ConfigError) else EXIT_FAILED
