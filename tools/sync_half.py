"""Generates the threaded half of the client from the asyncio half.

The two differ by `async` and `await`, by names, and by a few sentences of their docstrings, which `unasync` cannot
change. Modules that differ otherwise are written by hand on both sides, under the same names: waiting (`waiting.py`),
tokenisation (`preparation.py`) and the driver of the session (`LoopDriver`, `IoThread`).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "clients" / "zmqengine_client"
FILES = (
    "client.py",
    "deciding.py",
    "embedding.py",
    "group.py",
    "in_flight.py",
    "model_tokenizer.py",
    "reranking.py",
    "questions.py",
    "streams.py",
)
HEADER = "# Made from ../aio/{name} by `python -m tools`: change that one.\n"

NAMES = {
    "LoopDriver": "IoThread",
    "loop_driver": "io_thread",
    "aio": "sync",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
SENTENCES = {
    "The asynchronous client: sockets on the event loop, streams for `async for`.": (
        "The synchronous client: an I/O thread in the background, streams to iterate over."
    ),
    "A connection to one worker for the tasks of one event loop.": (
        "A connection to one worker, safe to use from many threads."
    ),
    "`on_event` is called on the event loop. Prompts are tokenised in a thread, off the loop.": (
        "`on_event` is called on the I/O thread. Prompts are tokenised on the thread that asks."
    ),
    "The prompt is tokenised off the loop.": "The prompt is tokenised on this thread.",
    "Chunks of many streams in one task": "Chunks of many streams on one thread",
    "The client is closed, or belongs to another process.": (
        "The client is closed, belongs to another process, or this is its own I/O thread."
    ),
    "Streams of the asynchronous client.": "Streams of the synchronous client.",
    "Many streams read by one task": "Many streams read by one thread",
    "For one task at a time.": "For one thread at a time.",
    "chunk by chunk, for one task.": "chunk by chunk, for one reader.",
    "`async for chunk in stream`": "`for chunk in stream`",
    "`anext(stream)`": "`next(stream)`",
}


def made(name: str) -> str:
    """The generated file of this name in `sync/`. Raises ValueError for a sentence that still mentions async."""
    source = (CLIENT / "aio" / name).read_text("utf-8")
    text = HEADER.format(name=name) + _without(source, list(_edits(source)))
    left = re.search(r"\b(async|await|asyncio|Async\w+)\b", text)
    if left:
        raise ValueError(f"{name}: {left[0]!r} has no counterpart: tools/sync_half.py must learn it")
    for command in (["check", "-q", "--select", "I", "--fix"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(CLIENT / "sync" / name), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def unused_sentences() -> set[str]:
    """Sentences of the table that occur in no file."""
    sources = "".join((CLIENT / "aio" / name).read_text("utf-8") for name in FILES)
    return {sentence for sentence in SENTENCES if sentence not in sources}


def write() -> None:
    """Write every generated file of `sync/`."""
    for name in FILES:
        (CLIENT / "sync" / name).write_text(made(name), encoding="utf-8")


def _edits(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Edits of the source: start, end, replacement."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            yield token.start, following.start, ""
        elif token.type == tokenize.NAME:
            yield token.start, token.end, _renamed(token.string)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            text = token.string
            for sentence, other in SENTENCES.items():
                text = text.replace(sentence, other)
            yield token.start, token.end, re.sub(r"\w+", lambda word: _renamed(word[0]), text)


def _renamed(name: str) -> str:
    return NAMES.get(name) or name.removeprefix("Async")


def _without(source: str, edits: list[tuple[tuple[int, int], tuple[int, int], str]]) -> str:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    pieces, done = [], 0
    for (row, column), (end_row, end_column), text in edits:
        pieces += [source[done : starts[row - 1] + column], text]
        done = starts[end_row - 1] + end_column
    return "".join([*pieces, source[done:]])
