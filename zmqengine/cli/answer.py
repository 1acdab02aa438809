"""Writes an answer as it comes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from zmqengine.cli.interrupts import ctrl_c_calls
from zmqengine.cli.progress_line import ProgressLine, bar
from zmqengine_client import Completion, TextStream


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written, and how fast it came. `interrupted` means that Ctrl-C stopped it."""

    text: str
    completion: Completion
    interrupted: bool
    first_s: float
    whole_s: float

    @property
    def summary(self) -> str:
        """One line of figures."""
        tokens = len(self.completion.tokens)
        decode_s = self.whole_s - self.first_s
        rate = f", {(tokens - 1) / decode_s:.0f} tokens/s" if tokens > 1 and decode_s > 0 else ""
        cached = f" ({self.completion.cached_tokens} cached)" if self.completion.cached_tokens else ""
        resumed = f", resumed {self.completion.resumed} times" if self.completion.resumed else ""
        return (
            f"{self.completion.prompt_tokens} tokens in{cached}, {tokens} out, "
            f"first after {self.first_s * 1000:.0f} ms{rate}, finish: {self.completion.finish}{resumed}"
        )


def write_answer(stream: TextStream) -> Answer:
    """Write the text to standard output, chunk by chunk. Ctrl-C aborts the request and keeps what is there.

    Raises the errors of the stream.
    """
    started_s = time.monotonic()
    first_s: float | None = None
    parts: list[str] = []
    with ctrl_c_calls(stream.abort) as interrupt, ProgressLine(lambda: _prompt_progress(stream)) as progress:
        for chunk in stream:
            if first_s is None:
                first_s = time.monotonic() - started_s
                progress.stop()
            parts.append(chunk.text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    whole_s = time.monotonic() - started_s
    return Answer(
        "".join(parts), stream.result, interrupt.pressed, whole_s if first_s is None else first_s, whole_s
    )


def _prompt_progress(stream: TextStream) -> str | None:
    progress = stream.progress
    if progress is None:
        return None
    return f"reading the prompt {bar(progress.done / max(1, progress.total))} of {progress.total} tokens"
