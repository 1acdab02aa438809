"""Faults around loading: a full disk, files that vanish, and a return to a model that was evicted."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.launching import GIB, LauncherProcess, entry_of, fake, toml, wait_for
from tests.support.workers import START_S, wait_until
from zmqengine.errors import ModelLoadError, Overloaded
from zmqengine.pico import model_path
from zmqengine.protocol.launcher import DIRECTORY
from zmqengine.serve import child
from zmqengine.serve.child import Record
from zmqengine.serve.entries import ModelOffer, read_offer
from zmqengine.serve.launcher import Launcher
from zmqengine.worker.process.memory_share import MemoryShare
from zmqengine_client import AsyncClient
from zmqengine_client.launcher import AsyncLauncher

pytestmark = pytest.mark.process


def in_process(directory: Path, models: str, work: Callable[[AsyncLauncher], Awaitable[None]]) -> None:
    """A launcher on this event loop, so that its system calls can be made to fail; its workers are real."""
    file = directory / "models.toml"
    file.write_text(models)
    root = directory / DIRECTORY

    def read() -> ModelOffer:
        return read_offer([str(file)], root, {})

    async def run() -> None:
        launcher = Launcher(root, read, 8 * GIB, claims=directory / ".memory")
        serving = asyncio.create_task(launcher.run())
        try:
            async with AsyncLauncher(f"ipc://{root}/ctl", answer_timeout_s=30) as asking:
                await work(asking)
        finally:
            launcher.stop()
            assert await serving == 0

    asyncio.run(run())


async def until(done: Callable[[], bool], otherwise: str) -> None:
    """Until `done()`, on this event loop."""
    deadline_s = asyncio.get_running_loop().time() + START_S
    while not done():
        assert asyncio.get_running_loop().time() < deadline_s, otherwise
        await asyncio.sleep(0.02)


def test_the_last_words_of_a_process_are_no_news(tmp_path: Path) -> None:
    """One that is killed says nothing of it: its log ends with what it did before."""
    ended = child.Child(Record("a", "", ""), tmp_path / "a.json", None)
    news = [
        "20:06:05.403 info session session=3e18",
        '{"time":"2026-11-26T20:58:22Z","level":"info","event":"request"}',
    ]
    ended.log.write_text("\n".join([*news, ""]))
    assert ended.last_words() == ""
    ended.log.write_text("\n".join([news[0], "zmqengine worker: no such file", news[1], ""]))
    assert ended.last_words() == "zmqengine worker: no such file"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a path that is short enough for sockets."""
    import tempfile

    monkeypatch.setenv("ZMQENGINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    return Path(tempfile.mkdtemp(prefix="zs-", dir="/tmp"))


def test_a_request_before_the_launcher_has_read_its_list_waits(short: Path) -> None:
    """It met a list without models, and was refused by a launcher that offers its model."""
    file = short / "models.toml"
    file.write_text(toml({"a": fake(1)}))
    root = short / DIRECTORY

    async def run() -> None:
        launcher = Launcher(
            root, lambda: read_offer([str(file)], root, {}), 8 * GIB, claims=short / ".memory"
        )
        async with AsyncLauncher(f"ipc://{root}/ctl", answer_timeout_s=30) as asking:
            waiting = asyncio.create_task(asking.want("a"))
            done, _ = await asyncio.wait((waiting,), timeout=0.3)
            assert not done
            serving = asyncio.create_task(launcher.run())
            try:
                await waiting
            finally:
                launcher.stop()
                assert await serving == 0

    asyncio.run(run())


def test_a_full_disk_fails_the_load_with_its_reason_and_costs_the_others_nothing(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of one model cannot be written: it fails after its retries, another loads, and later it does too."""
    write = child._write
    is_full = True

    def no_room(file: int, record: Record) -> None:
        if is_full and record.name == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, record)

    monkeypatch.setattr(child, "_write", no_room)

    async def work(launcher: AsyncLauncher) -> None:
        nonlocal is_full
        waiting = asyncio.create_task(launcher.want("a"))
        await launcher.want("b")
        with pytest.raises(ModelLoadError, match="No space left"):
            await waiting
        is_full = False
        await launcher.load("a")
        await launcher.want("a")

    in_process(short, toml({"a": fake(1), "b": fake(1)}), work)


def test_files_of_a_launcher_are_not_old_and_its_socket_comes_back(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a worker: what cleans /tmp goes by these times, and new front-ends find a socket that was removed."""
    monkeypatch.setattr("zmqengine.serve.launcher.TOUCH_S", 0.1)
    monkeypatch.setattr("zmqengine.serve.launcher.BEAT_S", 0.05)
    root = short / DIRECTORY
    paths = [root, root / "ctl", root / "a.json", root / "a.log"]

    async def work(launcher: AsyncLauncher) -> None:
        await launcher.want("a")
        for path in paths:
            os.utime(path, (1, 1))
        (root / "ctl").unlink()
        await until(lambda: all(path.exists() and path.stat().st_mtime > 1 for path in paths), str(paths))
        async with AsyncLauncher(f"ipc://{root}/ctl", answer_timeout_s=30) as later:
            assert [entry.state for entry in (await later.models()).models] == ["ready"]
        assert (await entry_of(launcher, "a")).state == "ready"

    in_process(short, toml({"a": fake(1)}), work)


def test_the_claim_of_a_worker_that_others_started_counts_until_it_ends(short: Path) -> None:
    share = MemoryShare(short / ".memory", "of somebody else", 3 * GIB)

    async def work(launcher: AsyncLauncher) -> None:
        listed = await launcher.models()
        while listed.foreign_bytes != 3 * GIB:
            await asyncio.sleep(0.02)
            listed = await launcher.models()
        with pytest.raises(Overloaded, match=r"take 3\.00 GiB of 8\.00 GiB"):
            await launcher.want("a")
        share.close()
        while (await launcher.models()).foreign_bytes:
            await asyncio.sleep(0.02)
        await launcher.want("a")

    in_process(short, toml({"a": fake(6)}), work)


def test_a_disk_that_is_full_after_the_start_loses_no_worker(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid cannot be written down: the worker serves, and is ended by the pid that it tells."""
    write, calls = child._write, 0

    def second_fails(file: int, record: Record) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, record)

    monkeypatch.setattr(child, "_write", second_fails)

    async def work(launcher: AsyncLauncher) -> None:
        await launcher.want("a")
        assert (await entry_of(launcher, "a")).pid

    in_process(short, toml({"a": fake(1)}), work)


def test_a_launcher_without_a_pid_in_the_record_still_ends_what_it_adopts(short: Path) -> None:
    """The launcher before died between the start of a worker and the note of its pid."""
    with LauncherProcess(toml({"a": fake(1)}, memory="8G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                await launcher.want("a")
                pid = (await entry_of(launcher, "a")).pid
                launched.kill()
                record = launched.root / "a.json"
                record.write_bytes(record.read_bytes().replace(f'"pid":{pid}'.encode(), b'"pid":0'))
                launched.start_again()
                entry = await wait_for(launcher, "a", lambda entry: entry.state == "ready", "not adopted")
                assert entry.pid == pid

        asyncio.run(run())
        assert launched.terminate() == 0
        assert launched.all_processes() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_return_to_an_evicted_model_finds_its_prompt_on_disk(tmp_path: Path) -> None:
    """Two models that do not fit: the first leaves, comes back, and reads a long prompt from `--cache-dir`."""
    need = read_offer([str(model_path())], tmp_path, {}).entries
    mebibytes = max(entry.need_bytes for entry in need.values()) // (1 << 20) + 1
    models = {name: {"path": "pico"} for name in ("first", "second")}
    text = toml(models, memory=f"{mebibytes * 3 // 2}M")
    prompt = [3 + number % 200 for number in range(1500)]

    async def ask(client: AsyncClient) -> Any:
        return await client.generate_tokens(prompt, max_tokens=4, seed=1, ignore_eos=True).read()

    with LauncherProcess(text, "--cache-dir", str(tmp_path / "cache")) as launched:

        async def run() -> None:
            async with (
                launched.client() as launcher,
                AsyncClient(launched.address, model="first", connect_timeout_s=60) as first,
            ):
                before = await ask(first)
                assert before.cached_tokens == 0
                call, _ = await launcher.want("second")
                assert (await entry_of(launcher, "first")).state == "unloaded"
                launcher.free(call)
                after = await ask(first)
                assert (await entry_of(launcher, "first")).loads == 2
                assert list(after.tokens) == list(before.tokens)
                assert after.cached_tokens >= 1400

        asyncio.run(run())


def test_a_log_is_kept_within_a_bound_while_its_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher puts it aside; the process goes on in the same file, from its beginning."""
    monkeypatch.setattr(child, "LOG_BYTES_MAX", 10_000)
    lines = tmp_path / "lines"
    os.mkfifo(lines)
    script = f"for line in open({str(lines)!r}): print('x' * 100, flush=True)"
    process = child.start(tmp_path / "w.json", Record("w", "", ""), [sys.executable, "-c", script], {})
    aside = process.log.with_name("w.log.1")
    with lines.open("w") as writer:
        for count in (120, 150, 60):
            writer.write("\n" * count)
            writer.flush()
            wait_until(functools.partial(has_bytes, process.log, 101 * count), "the process did not write")
            process.rotate_log()
            assert process.log.stat().st_size == (101 * count if count == 60 else 0)
    assert aside.stat().st_size == 101 * 150
    for path in (process.log, aside, tmp_path / "w.json"):
        assert path.stat().st_mode & 0o777 == 0o600
    wait_until(process.has_ended, "the process did not end")


def has_bytes(path: Path, size: int) -> bool:
    """Whether the file is that long."""
    return path.stat().st_size == size
