"""Trial of a constraint: it is compiled in a child process first, which the kernel ends when it takes too much, and
which measures the memory that it takes.

llguidance's limits hold in each operation between two steps, but not in compiling: wide regular expressions and pairs
of `patternProperties` take time with the square of the text and worse, and native code cannot be interrupted. A
constraint whose trial is over in time is compiled again by the worker. The child also takes what would end the process:
a stack that overflows, a lack of memory.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from zmqengine.engine.grammar.grammar import Kind, compile_grammar, vocabulary
from zmqengine.engine.host.host_heap import used_bytes
from zmqengine.errors import BadRequest

CPU_S_MAX = 2
"""Processor time of one trial, which the kernel counts in seconds. The slowest schema of the tests takes 0.4 s."""
MEMORY_BYTES_MAX = 256 << 20
"""Memory of one trial beyond that of the vocabulary, where the system has such a limit (Linux)."""
CHILDREN_MAX = 2
"""Trials at a time: with one a slow constraint would hold up all others."""
_COMMAND = (sys.executable, "-m", "zmqengine.engine.grammar.trial_compile")
_SIZE_BYTES = 4


class VocabularySource(msgspec.Struct, frozen=True):
    """Arguments of `vocabulary`, the first message to a child."""

    tokenizer_json: bytes
    vocab_size: int
    eos_token_ids: list[int]


class _Case(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of `compile_grammar`."""

    kind: Kind
    text: str
    choices: list[str]
    after: list[int]


class Trials:
    """Children that compile constraints. Any thread may call it; the first call starts a child."""

    def __init__(self, words: VocabularySource) -> None:
        self._vocabulary = words
        # The last one in is the first one out: without concurrency there is one child.
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(CHILDREN_MAX):
            self._free.put(None)

    def measure(self, kind: Kind, text: str, choices: Sequence[str] = (), after: Sequence[int] = ()) -> int:
        """Bytes that the compiled constraint takes; 0 for one that cannot be compiled, and where `used_bytes` is 0.

        Raises `BadRequest` if compiling takes more than `CPU_S_MAX` or `MEMORY_BYTES_MAX`. What else is wrong with a
        constraint is not said here.
        """
        child = self._free.get()
        try:
            if child is None or not child.is_alive:
                child = _Child(self._vocabulary)
            return child.compile(_Case(kind, text, list(choices), list(after)))
        except BrokenPipeError:
            raise BadRequest(
                f"constraint: the {kind} is too complex: compiling it takes more than {CPU_S_MAX} s or "
                f"{MEMORY_BYTES_MAX >> 20} MiB"
            ) from None
        finally:
            self._free.put(child)


class _Child:
    """One child process. It ends with its parent, when its standard input does."""

    def __init__(self, words: VocabularySource) -> None:
        # A group of its own: an interrupt at the terminal is for the worker. A panic quotes the constraint on stderr.
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._ask(msgspec.msgpack.encode(words))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def compile(self, case: _Case) -> int:
        """Bytes of the compiled constraint, 0 for one with a fault. Raises `BrokenPipeError` if it ended the child."""
        return self._ask(msgspec.msgpack.encode(case))

    def _ask(self, message: bytes) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, message)
            answer = self._process.stdout.read(_SIZE_BYTES)
        except BrokenPipeError:
            answer = b""
        if len(answer) < _SIZE_BYTES:
            self._process.wait()
            raise BrokenPipeError
        return int.from_bytes(answer, "big")


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_SIZE_BYTES, "big") + message)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """The next message; empty at the end."""
    return pipe.read(int.from_bytes(pipe.read(_SIZE_BYTES), "big"))


def main() -> None:
    """Compile what comes on standard input, and write the bytes of memory that each takes."""
    words = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=VocabularySource)
    tokens = vocabulary(words.tokenizer_json, vocab_size=words.vocab_size, eos_token_ids=words.eos_token_ids)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    grown_bytes = 0
    while True:
        sys.stdout.buffer.write(grown_bytes.to_bytes(_SIZE_BYTES, "big"))
        sys.stdout.buffer.flush()
        message = _read(sys.stdin.buffer)
        if not message:
            return
        case = msgspec.msgpack.decode(message, type=_Case)
        _limit_time()
        before, grown_bytes = used_bytes(), 0
        with contextlib.suppress(BadRequest):
            grammar = compile_grammar(tokens, case.kind, case.text, case.choices, case.after)
            grown_bytes = max(0, used_bytes() - before)
            del grammar


def _limit_time() -> None:
    """From here on the kernel ends the process after `CPU_S_MAX` and up to a second."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + CPU_S_MAX, most))


def _limit_memory() -> None:
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
