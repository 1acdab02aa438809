"""Clients that name a model: they wait for the load, tell how far it is, and let the model go when they are idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.serve.launching import LauncherProcess, entry_of, fake, toml, wait_for
from tests.support.workers import START_S
from zmqengine.errors import ConfigError, ModelLoadError, NeverFits, NotReady, UnknownModel, WorkerLost
from zmqengine_client import AsyncClient, Client, ClientEvent

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def launched() -> Iterator[LauncherProcess]:
    """One model loads slowly, two do not fit together, one never fits."""
    models = {"slow": fake(1, step_ms=300), "a": fake(6), "b": fake(6), "large": fake(50)}
    with LauncherProcess(toml(models, memory="8G")) as launched:
        yield launched


def tokens_of(client: Client, count: int = 5, seed: int = 1) -> list[int]:
    stream = client.generate_tokens([1, 2, 3], max_tokens=count, seed=seed)
    return [token for chunk in stream for token in chunk.tokens]


def test_a_client_waits_for_its_model_and_tells_how_far_it_is(launched: LauncherProcess) -> None:
    events: list[ClientEvent] = []
    with Client(launched.address, model="slow", on_event=events.append, connect_timeout_s=START_S) as client:
        assert len(tokens_of(client)) == 5
        assert client.describe().model is not None
        assert any(event.kind == "loading" and "slow" in event.message for event in events)


def test_an_idle_client_lets_its_model_go(launched: LauncherProcess) -> None:
    """It is held while requests run, and free a second after the last; the next request wants it again."""

    async def run() -> None:
        async with launched.client() as launcher, AsyncClient(launched.address, model="slow") as client:
            stream = client.generate_tokens([1], max_tokens=4_000, ignore_eos=True)
            async for _ in stream:
                entry = await entry_of(launcher, "slow")
                assert entry.requests >= 1
                break
            stream.abort()
            await wait_for(
                launcher, "slow", lambda entry: entry.requests == 0, "it is held without a request"
            )
            again = client.generate_tokens([1], max_tokens=2)
            assert len([t async for chunk in again for t in chunk.tokens]) == 2

    asyncio.run(run())


def test_what_the_launcher_refuses_is_raised(launched: LauncherProcess) -> None:
    with (
        Client(launched.address, model="slwo", connect_timeout_s=START_S) as misspelt,
        Client(launched.address, model="large", connect_timeout_s=START_S) as large,
    ):
        with pytest.raises(UnknownModel, match="slow"):
            tokens_of(misspelt)
        with pytest.raises(NeverFits):
            large.wait_ready()
        # Asked again, the launcher is asked again.
        with pytest.raises(NeverFits):
            tokens_of(large)


def test_a_model_that_never_fits_is_listed_with_the_numbers(launched: LauncherProcess) -> None:
    """Before anybody asks it: the page offered it as the first model, and its first question failed."""

    async def run() -> None:
        async with launched.client() as launcher:
            assert (await entry_of(launcher, "large")).never == "large needs 50.00 GiB and there are 8.00 GiB"
            assert (await entry_of(launcher, "a")).never == ""

    asyncio.run(run())


def test_a_wait_has_a_bound_and_can_be_left(launched: LauncherProcess) -> None:
    async def run() -> None:
        async with (
            launched.client() as launcher,
            AsyncClient(
                launched.address, model="b", connect_timeout_s=START_S, ready_timeout_s=0.5
            ) as waiter,
        ):
            # A client lets an idle model go after a second; this holds it to the end of the test.
            await launcher.want("a")
            with pytest.raises(NotReady, match="ready_timeout_s"):
                await waiter.generate_tokens([1], max_tokens=2).read()
            stream = waiter.generate_tokens([1], max_tokens=2)
            stream.abort()
            assert [chunk async for chunk in stream] == []
            assert stream.result.finish == "abort"

    asyncio.run(run())


def test_without_a_launcher_it_says_what_to_start() -> None:
    with (
        Client("ipc:///tmp/zs-none/ctl", model="a", connect_timeout_s=0.3) as client,
        pytest.raises(WorkerLost, match="zmqengine serve"),
    ):
        tokens_of(client)


def test_a_stream_goes_on_when_the_launcher_is_replaced() -> None:
    with LauncherProcess(toml({"a": fake(1, step_ms=5)}, memory="8G")) as launched:
        with Client(launched.address, model="a", connect_timeout_s=START_S) as client:
            stream = client.generate_tokens([1, 2], max_tokens=1500, seed=3)
            made = [*next(stream).tokens]
            launched.kill()
            made += [t for _ in range(20) for t in next(stream).tokens]
            launched.start_again()

            async def held() -> None:
                async with launched.client() as launcher:
                    await wait_for(launcher, "a", lambda entry: entry.state == "ready", "not adopted")

            asyncio.run(held())
            made += [t for chunk in stream for t in chunk.tokens]
        assert len(made) == 1500


def test_without_a_name_it_is_the_only_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Client()` beside `zmqengine serve`: the only model, or the only loaded one; else the choice is named at once."""

    async def listed(launched: LauncherProcess) -> list[str]:
        async with launched.client() as launcher:
            return [entry.name for entry in (await launcher.models()).models]

    models = toml({"a": fake(1), "b": fake(1)}, memory="8G")
    with LauncherProcess(models) as launched, Client(launched.address, model="a") as named:
        for name in ("ZMQENGINE_DIR", "ZMQENGINE_CACHE_DIR"):
            monkeypatch.setenv(name, launched.environment[name])
        assert asyncio.run(listed(launched)) == ["a", "b"]
        with Client() as client, pytest.raises(ConfigError, match="choose with model= or --model from a, b"):
            tokens_of(client)
        named.wait_ready()
        with Client() as client:
            assert tokens_of(client) == tokens_of(named)
            model = client.describe().model
            assert model is not None
            assert model.name == "a"
        said = launched.command("generate", "-n", "2", "Once")
        assert said.returncode == 0, said.stderr


def test_a_chat_names_its_model_and_changes_it() -> None:
    """The first argument is the model; a question of several words needs none where one is loaded."""
    with LauncherProcess(toml({"a": fake(1), "b": fake(1)}, memory="8G")) as launched:

        async def up() -> None:
            async with launched.client() as launcher:
                await launcher.models()

        asyncio.run(up())
        for words in (["a", "Hello"], ["Hello there"]):
            asked = launched.command("chat", "-n", "2", "--no-log", *words)
            assert asked.returncode == 0, asked.stderr
        talked = launched.command("chat", "a", typed="/model b\n/model\n/model nobody\n/model\n")
        assert talked.returncode == 1, "a command failed"
        answers = [line.split(" ")[0] for line in talked.stderr.splitlines() if line.endswith(" answers")]
        assert answers == ["b", "b", "b"]
        assert "The model 'nobody' does not exist; there are a, b" in talked.stderr


def test_a_command_without_a_worker_is_told_to_choose_a_model(launched: LauncherProcess) -> None:
    """At once. It waited for 10 s, and was told to start a worker."""
    for name in ("slow", "a"):
        warmed = launched.command("warm", "--model", name, str(launched.file))
        assert warmed.returncode == 0, warmed.stderr
    refused = launched.command("generate", "Once")
    assert refused.returncode == 2
    assert "choose with model= or --model from slow, a" in refused.stderr
    unknown = launched.command("generate", "--model", "nobody", "Once")
    assert unknown.returncode == 1
    assert unknown.stderr.endswith("The model 'nobody' does not exist; there are slow, a, b, large\n")


def test_status_and_metrics_show_every_model(launched: LauncherProcess) -> None:
    with Client(launched.address, model="slow", connect_timeout_s=START_S) as client:
        client.wait_ready()
        shown = launched.command("status")
        assert shown.returncode == 0, shown.stderr
        lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line}
        assert "ready" in lines["slow"]
        assert "50.00 GiB" in lines["large"]
        assert "8G for models" in lines["memory"]
        unclear = launched.command("status", "--ready")
        assert unclear.returncode == 2
        assert "--worker" in unclear.stderr
        metrics = launched.command("metrics", "--once").stdout
        assert 'zmqengine_model_state{model_name="slow",zmqengine_model_state="ready"} 1.0' in metrics
        assert 'zmqengine_up{model_name="slow",worker="slow"} 1.0' in metrics
        assert 'worker="large"' not in metrics, "a model without a worker is not one that is down"
        made = launched.command("generate", "--model", "slow", "--max-tokens", "3", "Hello")
        assert made.returncode == 0, made.stderr


@pytest.mark.slow
def test_two_clients_of_two_models_that_do_not_fit_both_finish(launched: LauncherProcess) -> None:
    made: dict[str, int] = {}

    def work(name: str) -> None:
        with Client(launched.address, model=name, connect_timeout_s=START_S) as client:
            for number in range(4):
                made[name] = made.get(name, 0) + len(tokens_of(client, seed=number))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_S)
    assert made == {"a": 20, "b": 20}


def test_a_stream_ends_with_the_reason_when_its_model_fails() -> None:
    """Nobody starts its worker again. It waited for one for a minute, and was told to start it. Loaded by command, the
    model serves the same client again."""
    models = toml({"a": {**fake(1, step_ms=20), "restarts-max": 1}}, memory="8G")
    with LauncherProcess(models) as launched:

        async def run() -> None:
            async with (
                launched.client() as launcher,
                AsyncClient(
                    launched.address, model="a", connect_timeout_s=START_S, worker_lost_timeout_s=10 * START_S
                ) as client,
            ):
                stream = client.generate_tokens([1], max_tokens=4_000, ignore_eos=True)
                await anext(stream)
                pid = (await entry_of(launcher, "a")).pid
                assert pid is not None
                psutil.Process(pid).kill()
                with pytest.raises(
                    ModelLoadError, match="a failed to load: its worker was killed by SIGKILL"
                ):
                    await asyncio.wait_for(stream.read(), START_S)
                await launcher.load("a")
                again = client.generate_tokens([1], max_tokens=2)
                assert len([token async for chunk in again for token in chunk.tokens]) == 2

        asyncio.run(run())
        assert "exit_code=-9" in launched.log
        assert "last_words=None" not in launched.log, "it said nothing"
