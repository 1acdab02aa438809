"""A real launcher with real workers: loading, leaving, reloading, and the death of the launcher itself."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
import zmq

from tests.serve.launching import LauncherProcess, entry_of, fake, toml, wait_for
from tests.support.adapters import write_opaque_adapter
from tests.support.workers import START_S, wait_until
from zmqengine.config import WorkerConfig
from zmqengine.errors import ConfigError, Draining, ModelLoadError, NeverFits, UnknownModel
from zmqengine.protocol.launcher import ModelProgress
from zmqengine.serve.control_socket import REQUEST_BYTES_MAX
from zmqengine.serve.entries import read_offer
from zmqengine.serve.gateway import GatewayRegistration
from zmqengine.worker.process.parent import WORKER_CONFIG
from zmqengine_client import AsyncClient

pytestmark = pytest.mark.process

TWO = toml({"a": fake(6), "b": {**fake(6), "aliases": ["bee"]}}, memory="10G")


def test_a_wanted_model_is_loaded_and_serves() -> None:
    with LauncherProcess(TWO) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                told: list[ModelProgress] = []
                _, granted = await launcher.want("bee", on_progress=told.append)
                assert granted.model == "b"
                async with AsyncClient(granted.address) as client:
                    tokens = [
                        t
                        async for chunk in client.generate_tokens([1, 2], max_tokens=4)
                        for t in chunk.tokens
                    ]
                assert len(tokens) == 4
                entry = await entry_of(launcher, "b")
                assert (entry.state, entry.loads, entry.requests) == ("ready", 1, 1)
                # A neighbour's equal share of the rest never takes what this one was loaded for.
                given = WorkerConfig.from_json(psutil.Process(entry.pid).environ()[WORKER_CONFIG])
                assert given.memory_least_bytes == entry.need_bytes
                assert (await entry_of(launcher, "a")).state == "unloaded"

        asyncio.run(run())
        assert launched.terminate() == 0
        assert launched.all_processes() == []


@pytest.mark.slow
def test_two_models_that_do_not_fit_take_turns() -> None:
    with LauncherProcess(TWO) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                call, _ = await launcher.want("a")
                waiting = asyncio.create_task(launcher.want("b"))
                await wait_for(launcher, "b", lambda entry: entry.waiting, "no request waits for b")
                listed = await launcher.models()
                assert listed.reserved_bytes <= listed.budget_bytes
                launcher.free(call)
                await waiting
                assert (await entry_of(launcher, "a")).state == "unloaded"

        asyncio.run(run())


def test_a_launcher_that_stops_refuses_who_waits_for_a_model() -> None:
    """At once: nothing is loaded any more, and the wait would last until the drain time is over."""
    with LauncherProcess(TWO) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                await launcher.want("a")
                waiting = asyncio.create_task(launcher.want("b", timeout_s=START_S))
                await wait_for(launcher, "b", lambda entry: entry.waiting, "no request waits for b")
                launched.process.terminate()
                with pytest.raises(Draining, match="the launcher is stopping"):
                    await waiting

        asyncio.run(run())
        assert launched.process.wait(START_S) == 0
        assert "stopping; a second time ends running requests at once running=1" in launched.log


def test_what_is_not_on_the_list_or_does_not_fit_is_refused_at_once() -> None:
    with LauncherProcess(toml({"large": fake(20), "qwen": fake(1)}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                with pytest.raises(UnknownModel, match="did you mean qwen"):
                    await launcher.want("qwenn")
                with pytest.raises(NeverFits, match=r"20\.00 GiB"):
                    await launcher.want("large")
                with pytest.raises(NeverFits):
                    await launcher.load("large")

        asyncio.run(run())
        assert "loading" not in launched.log


def test_unload_and_keep_alive_end_the_process() -> None:
    with LauncherProcess(toml({"a": {**fake(1), "preload": True}, "b": fake(1)}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                entry = await wait_for(launcher, "a", lambda entry: entry.state == "ready", "not preloaded")
                await launcher.unload("a")
                await wait_for(launcher, "a", lambda entry: entry.state == "unloaded", "not unloaded")
                assert entry.pid is not None
                assert not psutil.pid_exists(entry.pid)
                call, _ = await launcher.want("b", keep_alive_s=0)
                assert (await entry_of(launcher, "b")).state == "ready"
                launcher.free(call)
                await wait_for(launcher, "b", lambda entry: entry.state == "unloaded", "it stays")

        asyncio.run(run())


def test_a_killed_launcher_leaves_its_workers_and_the_next_one_adopts_them() -> None:
    """SIGKILL under a stream: no token is lost, and the same process serves on under the next launcher."""
    models = toml({"a": fake(1, step_ms=5), "b": fake(1)}, memory="10G")
    with LauncherProcess(models) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                _, granted = await launcher.want("a")
                before = await entry_of(launcher, "a")
                async with AsyncClient(granted.address) as client:
                    stream = client.generate_tokens([1, 2, 3], max_tokens=600)
                    made = 0
                    async for chunk in stream:
                        made += len(chunk.tokens)
                        if made > 20:
                            break
                    launched.kill()
                    rest = client.generate_tokens([1, 2, 3], max_tokens=100)
                    assert len([t async for chunk in rest for t in chunk.tokens]) == 100
                    launched.start_again()
                    after = await wait_for(launcher, "a", lambda entry: entry.state == "ready", "not adopted")
                    assert after.pid == before.pid
                    assert client.counters.worker_restarts == 0
                # What this connection had before is held at the next launcher too.
                await wait_for(launcher, "a", lambda entry: entry.requests == 1, "the hold is lost")
                await launcher.want("b")

        asyncio.run(run())
        assert launched.terminate() == 0
        assert launched.all_processes() == []


def test_a_worker_that_is_killed_comes_back_at_its_address_with_its_adapters(tmp_path: Path) -> None:
    """Those of its options and those that were loaded since, as far as their files are there."""
    first, second, third = (write_opaque_adapter(tmp_path / name) for name in ("first", "second", "third"))
    options = {"options": {"adapter": [f"first={first}"]}}
    with LauncherProcess(toml({"a": {**fake(1), **options}}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                assert (await entry_of(launcher, "a")).adapters == ["first"]
                _, granted = await launcher.want("a")
                async with AsyncClient(granted.address) as client:
                    await client.load_adapter("second", second)
                    await client.load_adapter("third", third)
                known = await wait_for(
                    launcher, "a", lambda entry: entry.adapters == ["first", "second", "third"], "untold"
                )
                shutil.rmtree(third)
                assert known.pid is not None
                psutil.Process(known.pid).kill()
                again = await wait_for(
                    launcher, "a", lambda entry: entry.state == "ready" and entry.pid != known.pid, "gone"
                )
                assert again.address == known.address
                async with AsyncClient(again.address) as client:
                    model = (await client.wait_ready()).model
                assert model is not None
                assert model.adapters == ["first", "second"]

        asyncio.run(run())


def test_a_model_that_fails_to_load_is_left_alone_after_five_times() -> None:
    # A step that raises, in the warm-up.
    bad = fake(1, faults=[{"place": "next", "action": "exit", "times": None}])
    with LauncherProcess(toml({"bad": bad, "good": fake(1)}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                waiting = asyncio.create_task(launcher.want("bad"))
                await launcher.want("good")
                with pytest.raises(ModelLoadError, match="failed to load"):
                    await waiting
                entry = await entry_of(launcher, "bad")
                assert (entry.state, entry.exit_code) == ("failed", 86)
                with pytest.raises(ModelLoadError):
                    await launcher.want("bad")

        asyncio.run(run())
        # The worker's own last words name the model too.
        assert launched.log.count("loading model=bad pid=") == launched.log.count("ended model=bad") == 5


def test_a_list_with_a_mistake_keeps_the_earlier_one() -> None:
    with LauncherProcess(toml({"a": fake(1), "b": fake(1)}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                await launcher.want("a")
                before = await entry_of(launcher, "a")
                launched.file.write_text("[[model]]\nname = 'a'\npinn = true\n")
                with pytest.raises(ConfigError, match="pinn"):
                    await launcher.reload()
                assert len((await launcher.models()).models) == 2
                launched.file.write_text(toml({"a": {**fake(1), "pin": True}, "c": fake(1)}, memory="10G"))
                assert launched.command("serve", "--reload").returncode == 0
                listed = {entry.name: entry for entry in (await launcher.models()).models}
                assert set(listed) == {"a", "c"}
                assert (listed["a"].pid, listed["a"].pin) == (before.pid, True)

        asyncio.run(run())


def test_sighup_reads_the_list_again_and_a_mistake_is_in_the_log() -> None:
    with LauncherProcess(toml({"a": fake(1)}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                await launcher.models()
                launched.file.write_text(toml({"a": fake(1), "b": fake(1)}, memory="10G"))
                launched.process.send_signal(signal.SIGHUP)
                await launcher.want("a")

                async def names() -> set[str]:
                    return {entry.name for entry in (await launcher.models()).models}

                while await names() != {"a", "b"}:
                    await asyncio.sleep(0.02)
                launched.file.write_text("[[model]")
                launched.process.send_signal(signal.SIGHUP)
                await asyncio.to_thread(
                    wait_until,
                    lambda: "list of models is unchanged" in launched.log,
                    "the mistake is not told",
                )
                assert await names() == {"a", "b"}

        asyncio.run(run())


def test_a_port_that_is_taken_ends_the_launcher_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with LauncherProcess(toml({"a": fake(1)}, memory="8G"), "--port", port, http=True) as launched:
            assert launched.process.wait(START_S) == 2
            assert f"port {port} of 127.0.0.1 is in use by another program" in launched.log
            assert launched.all_processes() == []


def test_a_model_that_is_to_be_preloaded_and_cannot_be_is_told() -> None:
    models = {"a": {**fake(6), "pin": True, "preload": True}, "b": {**fake(20), "preload": True}}
    with LauncherProcess(toml(models, memory="8G")) as launched:
        wait_until(lambda: "not preloaded: b needs 20.00 GiB" in launched.log, "it is not told")


def test_a_gateway_that_speaks_no_http_is_one_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """An HTTP error of the gateway ends neither the registration, which is tried again, nor a stop of the launcher."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        registration = GatewayRegistration(
            f"http://127.0.0.1:{server.getsockname()[1]}", "http://127.0.0.1:1"
        )
        asyncio.run(registration.keep(()))
        thread.join()
    assert "the gateway does not answer" in caplog.text


def test_a_second_launcher_is_refused_and_harms_nobody() -> None:
    with LauncherProcess(toml({"a": fake(1)}, memory="10G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                await launcher.want("a")
                second = await asyncio.to_thread(
                    launched.command, "serve", str(launched.file), "--no-http", "--memory-limit", "1G"
                )
                assert second.returncode != 0
                assert "already running" in second.stderr
                assert (await entry_of(launcher, "a")).state == "ready"

        asyncio.run(run())


def test_whoever_vanishes_frees_what_it_had() -> None:
    with LauncherProcess(TWO) as launched:

        async def run() -> None:
            holder = launched.client()
            await holder.want("a")
            # As a process that is killed: no word of farewell.
            assert holder._socket is not None
            holder._socket.close(0)
            async with launched.client() as launcher:
                await wait_for(launcher, "a", lambda entry: entry.requests == 0, "it is still held")

        asyncio.run(run())


def test_a_model_loads_where_it_just_fits() -> None:
    """Its worker refused the memory that the launcher had reckoned for it."""
    need = read_offer(["pico"], Path("/tmp"), {}).find("pico").need_bytes
    with LauncherProcess(toml({"pico": {}}, memory=need)) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                await launcher.want("pico")

        asyncio.run(run())


@pytest.mark.slow
def test_pico_is_served_from_the_list(tmp_path: Path) -> None:
    with LauncherProcess(toml({"pico": {}}, memory="4G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                stages = set[str]()
                _, granted = await launcher.want("pico", on_progress=lambda told: stages.add(told.stage))
                async with AsyncClient(granted.address) as client:
                    text = "".join(
                        [str(chunk) async for chunk in client.generate("Once upon a time", max_tokens=20)]
                    )
                assert text

        asyncio.run(run())


def test_a_frame_beyond_the_bound_ends_its_connection_alone() -> None:
    """None is kept in memory to be refused: a local program could send gigabytes."""
    with LauncherProcess(toml({"a": fake(1)}, memory="8G")) as launched:

        async def run() -> None:
            async with launched.client() as launcher:
                assert len((await launcher.models()).models) == 1
                sender: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
                monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                try:
                    sender.connect(launched.address)
                    sender.send_multipart([b"header", bytes(REQUEST_BYTES_MAX + 1)])
                    assert await asyncio.to_thread(monitor.poll, int(START_S * 1000)), (
                        "the connection goes on"
                    )
                    assert not sender.poll(0)
                finally:
                    sender.disable_monitor()
                    sender.close(0)
                assert len((await launcher.models()).models) == 1

        asyncio.run(run())
