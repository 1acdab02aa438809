"""Servers started by a run: ours, `mlx_lm.server`, vllm-mlx, the SMG gateway. They end with it.

All get the same tuned BLAS on one thread, and a free port.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from zmqengine.bench.models.model_facts import model_directory
from zmqengine.bench.servers.gateway import smg_commands
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.config import WorkerConfig
from zmqengine.engine.host.blas import tuned_blas
from zmqengine.python_child import python_command, python_environment
from zmqengine.worker.process.parent import WORKER_CONFIG

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0
ONE_THREAD = dict.fromkeys(
    (
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)


class StartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Servers to start. `model` is `pico` or a directory.

    `http` of our front-ends share the worker; with `smg`, so does a gateway. `mlx_lm` and `vllm_mlx`, a program on
    $PATH, need a directory. With `second`, each kind is started twice, for `two-models`. `slots` is the number of
    requests each server runs at a time; 0 leaves its default. `options`: more fields of the worker's configuration.
    """

    model: str
    worker: bool = True
    http: int = 0
    mlx_lm: bool = False
    vllm_mlx: bool = False
    smg: bool = False
    second: bool = False
    slots: int = 0
    engine: str = "mlx"
    options: dict[str, Any] = {}


@asynccontextmanager
async def started(plan: StartPlan) -> AsyncIterator[list[TargetSpec]]:
    """Targets of the servers in `plan`, all ready; the servers are ended on exit."""
    with tempfile.TemporaryDirectory(prefix="zmqengine-bench-", dir="/tmp") as directory:
        servers = _Servers(Path(directory))
        try:
            targets = []
            for suffix in ("", " (second)") if plan.second else ("",):
                targets += await servers.start(plan, suffix)
            yield targets
        finally:
            servers.end()


class _Servers:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self, plan: StartPlan, suffix: str) -> list[TargetSpec]:
        targets = []
        if plan.worker or plan.http or plan.smg:
            worker = self._start_worker(plan, suffix)
            await self._until_worker_ready(worker)
            targets += [worker] if plan.worker else []
            targets += [await self._start_http(worker, number, suffix) for number in range(plan.http)]
            targets += [await self._start_smg(worker, suffix)] if plan.smg else []
        if plan.mlx_lm:
            targets.append(await self._start_mlx_lm(plan, suffix))
        if plan.vllm_mlx:
            targets.append(await self._start_vllm_mlx(plan, suffix))
        return targets

    def _start_worker(self, plan: StartPlan, suffix: str) -> TargetSpec:
        address = f"ipc://{self._directory}/{len(self._processes)}/ctl"
        config = WorkerConfig(
            model=plan.model,
            bind=address,
            engine=plan.engine,
            supervise=False,
            die_with_parent=True,
            log_level="warning",
            rows_max=plan.slots or WorkerConfig().rows_max,
            # The others do not speculate, and random weights repeat themselves, which flatters drafts:
            # `python -m benchmarks.speculation` measures them.
            speculate="off",
            **plan.options,
        )
        process = self._spawn("worker" + suffix, ["zmqengine.worker"], {WORKER_CONFIG: config.to_json()})
        return TargetSpec(
            label="zmqengine" + suffix, kind="worker", address=address, worker=address, pids=[process.pid]
        )

    async def _start_http(self, worker: TargetSpec, number: int, suffix: str) -> TargetSpec:
        port = _free_port()
        label = f"zmqengine http{f' {number + 1}' if number else ''}{suffix}"
        arguments = ["http", "--worker", worker.address, "--port", str(port), "--log-level", "warning"]
        process = self._spawn(label, ["zmqengine.cli.main", *arguments])
        url = f"http://127.0.0.1:{port}"
        await self._until_answers(label, process, f"{url}/ready")
        models = msgspec.json.decode(await _get(f"{url}/v1/models"))
        return TargetSpec(
            label=label,
            kind="http",
            address=f"{url}/v1",
            model=models["data"][0]["id"],
            worker=worker.address,
            pids=[process.pid, *worker.pids],
        )

    async def _start_smg(self, worker: TargetSpec, suffix: str) -> TargetSpec:
        label = f"smg{suffix}"
        port = _free_port()
        commands = smg_commands(worker.address, (port, _free_port(), _free_port()))
        adapter = self._spawn(f"{label} adapter", commands.adapter)
        gateway = self._spawn(label, commands.gateway)
        url = f"http://127.0.0.1:{port}"
        models = msgspec.json.decode(await self._until_answers(label, gateway, f"{url}/v1/models"))
        # The gateway lists a model before it has loaded the tokenizer.
        first = msgspec.json.encode({"model": models["data"][0]["id"], "prompt": "Hello", "max_tokens": 1})
        await self._until(label, gateway, lambda: _get(f"{url}/v1/completions", first))
        return TargetSpec(
            label=label,
            kind="http",
            address=f"{url}/v1",
            model=models["data"][0]["id"],
            worker=worker.address,
            pids=[gateway.pid, adapter.pid, *worker.pids],
        )

    async def _start_mlx_lm(self, plan: StartPlan, suffix: str) -> TargetSpec:
        port, label = _free_port(), "mlx_lm.server" + suffix
        model = str(model_directory(plan.model))
        arguments = ["--model", model, "--port", str(port), "--log-level", "WARNING"]
        if plan.slots:
            arguments += ["--decode-concurrency", str(plan.slots), "--prompt-concurrency", str(plan.slots)]
        process = self._spawn(label, ["zmqengine.bench.servers.mlx_lm_server", *arguments])
        url = f"http://127.0.0.1:{port}"
        await self._until_answers(label, process, f"{url}/health")
        return TargetSpec(
            label=label, kind="http", address=f"{url}/v1", model="default_model", pids=[process.pid]
        )

    async def _start_vllm_mlx(self, plan: StartPlan, suffix: str) -> TargetSpec:
        port, label = _free_port(), "vllm-mlx" + suffix
        program = shutil.which("vllm-mlx")
        if program is None:
            raise TargetError(
                "vllm-mlx is not on $PATH: it is a program of its own, in an environment of its own"
            )
        command = [program, "serve", str(model_directory(plan.model)), "--port", str(port)]
        command += ["--served-model-name", "model", "--continuous-batching", "--offline"]
        if plan.slots:
            command += ["--max-num-seqs", str(plan.slots)]
        # It finds its BLAS as our worker does, or none.
        process = self._run(label, command, {"LD_PRELOAD": tuned_blas()})
        url = f"http://127.0.0.1:{port}"
        await self._until_answers(label, process, f"{url}/v1/models")
        return TargetSpec(label=label, kind="http", address=f"{url}/v1", model="model", pids=[process.pid])

    def _spawn(
        self, label: str, module: Sequence[str], extra: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        return self._run(label, python_command(*module), extra)

    def _run(
        self, label: str, command: Sequence[str], extra: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with self._log(label).open("wb") as log:
            process = subprocess.Popen(
                command,
                env=python_environment({**ONE_THREAD, "HF_HUB_OFFLINE": "1", **(extra or {})}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def _log(self, label: str) -> Path:
        return self._directory / f"{label.replace(' ', '-')}.log"

    async def _until_worker_ready(self, worker: TargetSpec) -> None:
        from zmqengine.bench.targets.worker_target import WorkerSession

        session = await WorkerSession.open(worker, timeout_s=START_TIMEOUT_S)
        await session.close()

    async def _until_answers(self, label: str, process: subprocess.Popen[bytes], url: str) -> bytes:
        return await self._until(label, process, lambda: _get(url))

    async def _until(
        self, label: str, process: subprocess.Popen[bytes], probe: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """The result of `probe`, repeated until it raises no OSError."""
        deadline_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline_s:
            if process.poll() is not None:
                break
            try:
                return await probe()
            except OSError:
                await asyncio.sleep(0.1)
        lines = self._log(label).read_text(errors="replace").strip().splitlines()[-3:]
        raise TargetError(f"{label} did not start: {' | '.join(lines) or 'no answer'}")

    def end(self) -> None:
        """Terminate each server, and kill it if it does not end in time."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _get(url: str, content: bytes | None = None) -> bytes:
    """The body of a 200 answer to a GET, or to a POST of `content`; OSError for any other."""
    import urllib.request

    def get() -> bytes:
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            body: bytes = response.read()
            return body

    return await asyncio.get_running_loop().run_in_executor(None, get)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
