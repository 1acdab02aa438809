"""Writes an answer to the terminal as it arrives."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from zmqengine.cli.markdown import PLAIN, TerminalWriter
from zmqengine.cli.progress_line import ProgressLine, bar
from zmqengine_client import Completion, TextStream

_RATE_TOKENS_MIN = 8


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer that was written, and its timing. `interrupted` means that Ctrl-C stopped it."""

    text: str
    completion: Completion
    interrupted: bool
    first_tokens: int
    first_s: float
    whole_s: float

    @property
    def summary(self) -> str:
        """One line of figures."""
        tokens = len(self.completion.tokens)
        later_tokens, later_s = tokens - self.first_tokens, self.whole_s - self.first_s
        # A handful of tokens that arrived together have no rate.
        rate = f", {later_tokens / later_s:.0f} tokens/s" if later_tokens >= _RATE_TOKENS_MIN else ""
        cached = f" ({self.completion.cached_tokens} cached)" if self.completion.cached_tokens else ""
        times = self.completion.resumed
        resumed = f", resumed {'once' if times == 1 else f'{times} times'}" if times else ""
        return (
            f"{self.completion.prompt_tokens} tokens in{cached}, {tokens} out, "
            f"first after {self.first_s * 1000:.0f} ms{rate}, finish: {self.completion.finish}{resumed}"
        )


def write_answer(stream: TextStream, writer: TerminalWriter = PLAIN) -> WrittenAnswer:
    """Write the answer chunk by chunk, its text to standard output without another `writer`.

    Ctrl-C aborts the request and keeps the text so far.

    Raises the errors of the stream.
    """
    started_s = time.monotonic()
    first_s, first_tokens = None, 0
    parts: list[str] = []
    with ctrl_c_calls(stream.abort) as interrupt, ProgressLine(lambda: _prompt_progress(stream)) as progress:
        for chunk in stream:
            if first_s is None:
                first_s, first_tokens = time.monotonic() - started_s, len(chunk.tokens)
                progress.stop()
            if chunk.reasoning:
                writer.think(chunk.reasoning)
            if chunk.text:
                writer.write(chunk.text)
            parts.append(chunk.text)
    whole_s = time.monotonic() - started_s
    return WrittenAnswer(
        text="".join(parts),
        completion=stream.result,
        interrupted=interrupt.pressed,
        first_tokens=first_tokens,
        first_s=whole_s if first_s is None else first_s,
        whole_s=whole_s,
    )


def _prompt_progress(stream: TextStream) -> str | None:
    progress = stream.progress
    if progress is None:
        return None
    return f"reading the prompt {bar(progress.done / max(1, progress.total))} of {progress.total} tokens"


class Interrupt:
    """A flag: whether Ctrl-C was pressed."""

    pressed = False


@contextlib.contextmanager
def ctrl_c_calls(action: Callable[[], object]) -> Iterator[Interrupt]:
    """In this context the first Ctrl-C calls `action`, the second raises KeyboardInterrupt."""
    interrupt = Interrupt()

    def pressed(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True
        # On another thread: the interrupted code may hold a lock that the action needs.
        threading.Thread(target=action, daemon=True).start()

    earlier = signal.signal(signal.SIGINT, pressed)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, earlier)
