"""`zmqengine demo`: two front-ends that stream from one worker at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import click

from zmqengine.cli.commands.demo.images import ask_about_images
from zmqengine.cli.commands.demo.tools import run_tools
from zmqengine.cli.started_worker import end, started_worker
from zmqengine.python_child import python_command, python_environment
from zmqengine_client.images.decoding import NO_PILLOW

PROMPTS = ("Once upon a time", "There was once")
_DRAW_EVERY_S = 1 / 30
_CRASH_AFTER_CHUNKS = 10


@click.command()
@click.option(
    "--model",
    help="A bundled one, a directory or a hub id.  [default: pico; with --tools, pico-tools; with --image, pico-eye]",
)
@click.option("-n", "--max-tokens", type=int, default=200, show_default=True, help="For each of the two.")
@click.option("--seed", type=int, default=7, show_default=True)
@click.option("--crash", is_flag=True, help="Kill the worker while it streams, to see that nothing is lost.")
@click.option("--tools", is_flag=True, help="Instead, let the model call functions of this program.")
@click.option("--image", is_flag=True, help="Instead, ask the model about pictures.")
def demo(model: str | None, max_tokens: int, seed: int, crash: bool, tools: bool, image: bool) -> None:
    """Start a worker and two front-end processes that stream from it at once, side by side."""
    if tools + crash + image > 1:
        raise click.UsageError("--crash, --tools and --image are three demonstrations: choose one")
    if image and find_spec("PIL") is None:
        raise click.UsageError(NO_PILLOW)
    model = model or ("pico-tools" if tools else "pico-eye" if image else "pico")
    with started_worker(model) as (name, worker_pid):
        click.echo(f"worker: process {worker_pid}, model {model}", err=True)
        if tools:
            figures = run_tools(name, max_tokens)
            click.echo(f"\n{figures.calls} calls, {figures.tokens} tokens in {figures.seconds:.2f} s")
            return
        if image:
            seen = ask_about_images(name, max_tokens)
            click.echo(f"{seen.images} pictures, {seen.tokens} tokens in {seen.seconds:.2f} s")
            return
        with _front_ends(name, max_tokens, seed) as front_ends:
            _stream(front_ends, worker_pid if crash else None)
    _report(front_ends)
    if crash and not any(front_end.figures["resumed"] for front_end in front_ends):
        click.echo(
            "Both had ended before the worker was killed: another --seed may give longer texts.", err=True
        )


@dataclass(slots=True)
class _FrontEnd:
    process: subprocess.Popen[bytes]
    prompt: str
    ready: bool = False
    text: str = ""
    chunks: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    unread: bytes = b""

    @property
    def column(self) -> str:
        return f"front-end, process {self.process.pid}\n\n{self.prompt}{self.text}"

    def start(self) -> None:
        """Tell the process to begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def read(self) -> bool:
        """Read from the process, blocking until there is something; False at its end."""
        assert self.process.stdout is not None
        # Not readline: the selector does not see data in its buffer.
        received = os.read(self.process.stdout.fileno(), 65_536)
        *lines, self.unread = (self.unread + received).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(received)

    def _take(self, said: dict[str, Any]) -> None:
        self.ready = self.ready or "ready" in said
        if "text" in said:
            self.text += said["text"]
            self.chunks += 1
        if "tokens" in said:
            self.figures = said


@contextlib.contextmanager
def _front_ends(name: str, max_tokens: int, seed: int) -> Iterator[list[_FrontEnd]]:
    """Two front-end processes that are connected and wait to be started."""
    front_ends: list[_FrontEnd] = []
    try:
        for prompt in PROMPTS:
            arguments = [name, prompt, str(seed), str(max_tokens)]
            process = subprocess.Popen(
                python_command("zmqengine.cli.commands.demo.front_end", *arguments),
                env=python_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            front_ends.append(_FrontEnd(process, prompt))
        for front_end in front_ends:
            while not front_end.ready:
                if not front_end.read():
                    raise click.ClickException("a front-end could not connect; it says why above")
        yield front_ends
    finally:
        for front_end in front_ends:
            end(front_end.process)


def _stream(front_ends: list[_FrontEnd], crash_pid: int | None) -> None:
    """Read both until both have ended, drawing their texts on a terminal."""
    columns = Columns() if sys.stdout.isatty() else None
    drawn_s = 0.0
    with selectors.DefaultSelector() as selector:
        for front_end in front_ends:
            assert front_end.process.stdout is not None
            selector.register(front_end.process.stdout, selectors.EVENT_READ, front_end)
            front_end.start()
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
            if crash_pid is not None and sum(one.chunks for one in front_ends) >= _CRASH_AFTER_CHUNKS:
                os.kill(crash_pid, signal.SIGKILL)
                crash_pid = None
            if columns and time.monotonic() - drawn_s > _DRAW_EVERY_S:
                columns.draw([front_end.column for front_end in front_ends])
                drawn_s = time.monotonic()
    texts = [front_end.column for front_end in front_ends]
    if columns:
        columns.draw(texts)
    else:
        click.echo("\n".join(side_by_side(texts, 100)))


def _report(front_ends: list[_FrontEnd]) -> None:
    click.echo()
    for front_end in front_ends:
        figures = front_end.figures
        if not figures:
            raise click.ClickException(f"front-end {front_end.process.pid} ended early; it says why above")
        resumed = f", survived {figures['resumed']} crash of the worker" if figures["resumed"] else ""
        click.echo(
            f"front-end {front_end.process.pid}: {figures['tokens']} tokens, "
            f"{figures['tokens_per_s']:.0f} tokens/s, first token after {figures['first_ms']:.0f} ms{resumed}"
        )


_BETWEEN = " | "


def side_by_side(texts: Sequence[str], width: int) -> list[str]:
    """Texts wrapped in columns of equal width, as lines of at most `width` characters if a column has one."""
    column = max(1, (width - len(_BETWEEN) * (len(texts) - 1)) // len(texts))
    wrapped = [
        [line for paragraph in text.split("\n") for line in textwrap.wrap(paragraph, column) or [""]]
        for text in texts
    ]
    height = max(map(len, wrapped))
    rows = zip(*(lines + [""] * (height - len(lines)) for lines in wrapped), strict=True)
    return [_BETWEEN.join(cell.ljust(column) for cell in row).rstrip() for row in rows]


class Columns:
    """A drawing on the terminal that replaces the previous one."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, texts: Sequence[str]) -> None:
        """Draw the texts, or their ends if the terminal is not high enough."""
        size = shutil.get_terminal_size()
        lines = side_by_side(texts, size.columns - 1)[-(size.lines - 2) :]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        sys.stdout.write(up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
        sys.stdout.flush()
        self._drawn = len(lines)
