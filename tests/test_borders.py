"""Dependencies point one way: cli -> worker -> engine, clients -> protocol; MLX is touched where it is named."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import tomllib  # type: ignore[import-not-found, unused-ignore]

from tools import module_graph

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "clients"

# MLX is imported in the engine and by what measures against it. Within the engine, these files have none of it, and the
# front-ends and threads that import them stay free of MLX.
MLX_ROOMS = ("zmqengine/engine/", "zmqengine/bench/")
MLX_FREE = {
    "zmqengine/engine/fake/",
    "zmqengine/engine/host/device_errors.py",
    "zmqengine/engine/host/machine_probe.py",
    "zmqengine/engine/load/tokenizer_export.py",
    "zmqengine/engine/cuda/kernel_cache.py",
    "zmqengine/engine/cuda/nvrtc.py",
    "zmqengine/engine/adapter_files.py",
    "zmqengine/engine/image_names.py",
    "zmqengine/engine/interface.py",
    "zmqengine/engine/options.py",
    "zmqengine/engine/prefix_cache/disk/block_file.py",
    "zmqengine/engine/prefix_cache/disk/directory.py",
    "zmqengine/engine/prefix_cache/disk/write_thread.py",
    "zmqengine/engine/disk_cache.py",
    "zmqengine/engine/texts/text_rows.py",
    "zmqengine/engine/row.py",
    "zmqengine/engine/seeds.py",
}
# mlx-lm changes its arguments with every release: one file of the engine, and what the benchmark measures against.
MLX_LM_FILES = {
    "zmqengine/bench/device/architectures.py",
    "zmqengine/bench/servers/bare_generator.py",
    "zmqengine/bench/servers/mlx_lm_server.py",
    "zmqengine/bench/models/random_model.py",
    "zmqengine/engine/models/mlx_lm.py",
}
# Package -> what it may import of ours, itself included.
ALLOWED = {
    "zmqengine": set(),
    "zmqengine.errors": set(),
    "zmqengine.sampling_params": {"zmqengine.errors"},
    "zmqengine.vision_card": {"zmqengine.errors", "zmqengine.sampling_params"},
    "zmqengine.request_rules": {"zmqengine.errors", "zmqengine.sampling_params"},
    "zmqengine.protocol": {
        "zmqengine.errors", "zmqengine.protocol", "zmqengine.sampling_params", "zmqengine.vision_card",
    },
    "zmqengine.client_rules": {"zmqengine.errors"},
    "zmqengine.option": {"zmqengine.errors"},
    "zmqengine.paths": set(),
    "zmqengine.python_child": set(),
    "zmqengine.tcp_probes": set(),
    "zmqengine.config": {
        "zmqengine.client_rules", "zmqengine.engine", "zmqengine.errors", "zmqengine.option", "zmqengine.protocol",
    },
    "zmqengine.engine": {
        "zmqengine.checkpoint", "zmqengine.errors", "zmqengine.engine", "zmqengine.option", "zmqengine.paths",
        "zmqengine.python_child", "zmqengine.request_rules", "zmqengine.sampling_params", "zmqengine.vision_card",
    },
    "zmqengine.pico": set(),
    "zmqengine.worker": {
        "zmqengine", "zmqengine.checkpoint", "zmqengine.client_rules", "zmqengine.config", "zmqengine.engine",
        "zmqengine.errors", "zmqengine.pico", "zmqengine.protocol", "zmqengine.python_child", "zmqengine.request_rules",
        "zmqengine.tcp_probes", "zmqengine.vision_card", "zmqengine.worker",
    },
    "zmqengine.serve": {
        "zmqengine.checkpoint", "zmqengine.config", "zmqengine.engine", "zmqengine.errors", "zmqengine.option",
        "zmqengine.paths", "zmqengine.pico", "zmqengine.protocol", "zmqengine.python_child", "zmqengine.serve",
        "zmqengine.worker", "zmqengine_client",
    },
    "zmqengine.bench": {
        "zmqengine.bench", "zmqengine.config", "zmqengine.engine", "zmqengine.errors", "zmqengine.pico",
        "zmqengine.protocol", "zmqengine.python_child", "zmqengine.worker", "zmqengine_client",
    },
    "zmqengine.testing": {
        "zmqengine.config", "zmqengine.engine", "zmqengine.python_child", "zmqengine.worker", "zmqengine_client",
    },
    "zmqengine.checkpoint": {"zmqengine.checkpoint", "zmqengine.errors", "zmqengine.vision_card"},
    "zmqengine.conformance": {"zmqengine.conformance"},
    "zmqengine.doctor": {
        "zmqengine", "zmqengine.checkpoint", "zmqengine.doctor", "zmqengine.engine", "zmqengine.errors",
        "zmqengine.pico", "zmqengine.protocol", "zmqengine.python_child", "zmqengine_client",
    },
    "zmqengine.cli": {
        "zmqengine", "zmqengine.bench", "zmqengine.checkpoint", "zmqengine.cli", "zmqengine.config",
        "zmqengine.conformance", "zmqengine.doctor", "zmqengine.errors", "zmqengine.option", "zmqengine.paths",
        "zmqengine.pico", "zmqengine.protocol", "zmqengine.python_child", "zmqengine.sampling_params",
        "zmqengine.serve", "zmqengine.worker", "zmqengine_client", "zmqengine_http", "zmqengine_metrics",
        "zmqengine_smg", "zmqengine_top",
    },
    "zmqengine_client": {
        "zmqengine", "zmqengine.errors", "zmqengine.paths", "zmqengine.protocol", "zmqengine.request_rules",
        "zmqengine.sampling_params", "zmqengine.tcp_probes", "zmqengine.vision_card", "zmqengine_client",
    },
    "zmqengine_http": {"zmqengine", "zmqengine.errors", "zmqengine.option", "zmqengine.paths", "zmqengine.protocol",
        "zmqengine.request_rules", "zmqengine.sampling_params", "zmqengine.vision_card", "zmqengine_client",
        "zmqengine_http", "zmqengine_metrics",
    },
    "zmqengine_metrics": {"zmqengine.errors", "zmqengine.protocol", "zmqengine_client", "zmqengine_metrics"},
    "zmqengine_top": {
        "zmqengine.errors", "zmqengine.protocol", "zmqengine_client", "zmqengine_metrics", "zmqengine_top",
    },
    "zmqengine_smg": {
        "zmqengine", "zmqengine.errors", "zmqengine.protocol", "zmqengine.sampling_params", "zmqengine_client",
        "zmqengine_smg",
    },
}  # fmt: skip


def sources() -> list[tuple[str, Path]]:
    """Every module of the distribution, by its path in the wheel."""
    found = [(path.relative_to(ROOT).as_posix(), path) for path in (ROOT / "zmqengine").rglob("*.py")]
    found += [(path.relative_to(CLIENTS).as_posix(), path) for path in CLIENTS.rglob("*.py")]
    return sorted(found)


def imports(path: Path) -> Iterable[str]:
    """Full names of what a file imports, anywhere in it."""
    return module_graph.imports(path)


def top(name: str) -> str:
    """`zmqengine.protocol.codec` -> `zmqengine.protocol`; `zmqengine_client.keys` -> `zmqengine_client`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "zmqengine" else parts[0]


def test_mlx_is_imported_only_where_it_is_named() -> None:
    """vllm-mlx #479 and smg #1427 A: code that may touch MLX is a short list, all of it run by one thread."""
    for name, path in sources():
        found = {imported.split(".")[0] for imported in imports(path)}
        if not name.startswith(MLX_ROOMS) or name.startswith(tuple(MLX_FREE)):
            assert not found & {"mlx", "mlx_lm"}, name
        if name not in MLX_LM_FILES:
            assert "mlx_lm" not in found, name


def test_a_package_imports_only_what_it_stands_on() -> None:
    """No client knows the worker, no engine knows the wire, and the protocol knows nobody."""
    for name, path in sources():
        package = top(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        ours = {top(imported) for imported in imports(path) if imported.split(".")[0].startswith("zmqengine")}
        assert ours <= ALLOWED[package], name


# Packages for tracing have an extra of their own.
@pytest.mark.parametrize(
    ("extra", "apart"), [("http", {"opentelemetry"}), ("metrics", set()), ("smg", set())]
)
def test_a_front_end_finds_what_it_imports_in_its_extra(extra: str, apart: set[str]) -> None:
    """Installed by itself, as in a container of its own, it can do all that it does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"][extra]]
    installed = {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in required}
    distributions = importlib.metadata.packages_distributions()
    imported = {
        module.split(".")[0]
        for path in (CLIENTS / f"zmqengine_{extra}").rglob("*.py")
        for module in imports(path)
    }
    missing = {
        module
        for module in imported - sys.stdlib_module_names - {"_typeshed"} - apart
        if not module.startswith("zmqengine")
        and installed.isdisjoint(map(canonical, distributions.get(module, (module,))))
    }
    assert not missing


def canonical(distribution: str) -> str:
    """The name of a distribution as an index spells it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_no_file_imports_in_a_circle() -> None:
    """Files can be read from the lowest floor up. What two files need of each other is a third one."""
    assert module_graph.floors(module_graph.files())


@pytest.mark.parametrize("package", module_graph.packages())
def test_every_folder_is_a_tower(package: str) -> None:
    """Neither do folders: a folder and a file beside it do not import from each other, by whatever files."""
    assert module_graph.floors(module_graph.inside(package))


# The rooms of each package, from the ground up: a file imports from its own room and from those before it. Files that
# stand beside the rooms are named like rooms.
ROOMS = {
    "zmqengine.engine": (
        "options", "seeds", "host", "disk_cache", "grammar", "adapter_files", "interface", "image_names", "texts",
        "row", "sampling", "kv", "models", "adapters", "cpu", "metal", "vision", "cuda", "autotune", "load",
        "prefix_cache", "speculation", "step", "fake", "embedding", "open",
    ),
    "zmqengine.worker": (
        "process", "requests", "telemetry", "open_engine", "context", "scheduler", "adapter_calls", "preparing", "wire",
        "lifecycle", "batch", "intake", "idle", "timers", "actor", "main", "__main__",
    ),
    "zmqengine.serve": (
        "model", "fleet", "entries", "measured", "child", "follower", "front_end", "control_socket", "gateway",
        "launcher",
    ),
    "zmqengine_http": (
        "config", "serving", "call_grammars", "answers", "workers", "processes", "prompt",
        "stable_head", "batches", "endpoint", "generating", "apis", "openapi", "page", "endpoints",
        "app", "server",
    ),
}  # fmt: skip


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_stand_in_the_stated_order(package: str) -> None:
    """No room imports from one that stands above it, and every room has its place in the order."""
    order = {room: floor for floor, room in enumerate(ROOMS[package])}
    graph = {room: others for room, others in module_graph.inside(package).items() if room != "__init__"}
    assert set(graph) == set(order)
    above = [
        (room, other)
        for room, others in graph.items()
        for other in others
        if order.get(other, -1) > order[room]
    ]
    assert above == []


@pytest.mark.parametrize(
    ("room", "others"),
    [
        ("zmqengine.engine.sampling", {"kv", "cuda", "autotune", "speculation", "step", "prefix_cache"}),
        ("zmqengine.engine.speculation", {"cuda", "autotune", "step", "prefix_cache"}),
        ("zmqengine.engine.step", {"cuda", "autotune"}),
        (
            "zmqengine.engine.kv",
            {"models", "cuda", "autotune", "host", "sampling", "speculation", "step", "prefix_cache"},
        ),
        ("zmqengine.engine.models", {"cpu", "cuda", "autotune", "host", "step", "prefix_cache"}),
        ("zmqengine.engine.autotune", {"cuda"}),
        ("zmqengine.engine.load", {"cuda"}),
        ("zmqengine.worker.scheduler", {"wire", "lifecycle", "batch", "intake"}),
    ],
)
def test_a_room_knows_nothing_of_some_others(room: str, others: set[str]) -> None:
    """Sampling can be read without KV caches, both without speculative decoding, and the scheduler without the wire."""
    package = room.rpartition(".")[0]
    assert not module_graph.inside(package)[room.rpartition(".")[2]] & others


def test_only_open_names_a_back_end() -> None:
    """What runs on one is chosen there, and handed on: a room that asks again may come to another answer."""
    asks = {"zmqengine.engine.host.backend", "zmqengine.engine.host.backend.on_cuda", "zmqengine.engine.cuda"}
    for name, path in sources():
        if name.startswith("zmqengine/engine/") and not name.startswith(
            ("zmqengine/engine/open.py", "zmqengine/engine/host/", "zmqengine/engine/cuda/")
        ):
            found = set(imports(path))
            assert not found & asks, name
            assert not [other for other in found if other.startswith("zmqengine.engine.cuda")], name


def test_no_folder_holds_more_than_its_reader_can_take_in() -> None:
    """More than about twenty files side by side have a structure that is not shown."""
    folders: dict[Path, int] = {}
    for path in module_graph.modules().values():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    crowded = {folder.relative_to(ROOT).as_posix(): count for folder, count in folders.items() if count > 20}
    assert set(crowded) <= CROWDED


# To be taken apart next: the core of the client, the commands and the benchmarks.
CROWDED: set[str] = set()


def test_a_circle_is_found() -> None:
    """The tower is not one by default."""
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"}), "d": frozenset({"a"})}
    with pytest.raises(ValueError, match="a -> b -> c -> a"):
        module_graph.floors(graph)
    assert module_graph.floors({**graph, "c": frozenset()}) == [["c"], ["b"], ["a"], ["d"]]


@pytest.mark.parametrize(
    ("room", "others"),
    [
        ("zmqengine_client.core", {"zmq", "threading", "asyncio", "time", "socket", "select", "concurrent"}),
        ("zmqengine_client.text", {"zmq", "asyncio", "socket", "select"}),
        ("zmqengine_client.aio", {"threading"}),
        ("zmqengine_client.sync", {"asyncio"}),
    ],
)
def test_a_room_of_the_client_has_no_other_way_to_wait(room: str, others: set[str]) -> None:
    """The core is told the time and never waits; each half waits in its own way."""
    files = {name: path for name, path in module_graph.modules().items() if name.startswith(room + ".")}
    assert files
    for name, path in files.items():
        assert not {imported.split(".")[0] for imported in imports(path)} & others, name


def test_the_protocol_has_no_sockets_and_no_mlx() -> None:
    """Messages can be made and read where neither is installed."""
    for name, path in sources():
        if name.startswith("zmqengine/protocol/"):
            assert not {imported.split(".")[0] for imported in imports(path)} & {"zmq", "mlx", "mlx_lm"}


def test_every_file_on_the_lists_is_there() -> None:
    """A list that names what is gone protects nothing."""
    names = {name for name, _ in sources()}
    assert names >= MLX_LM_FILES
    assert all(any(name.startswith(free) for name in names) for free in MLX_FREE)


def test_no_module_is_a_drawer() -> None:
    """A file's name says what it does."""
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [name for name, path in sources() if path.stem in drawers]


@pytest.mark.parametrize(
    "package",
    [
        "zmqengine_client",
        "zmqengine_http",
        "zmqengine_smg.grpc_server",
        "zmqengine.cli.main",
        "zmqengine.engine.prefix_cache.disk.write_thread",
        "zmqengine.serve.launcher",
        "zmqengine.worker.main",
    ],
)
def test_importing_a_front_end_or_the_idle_worker_loads_no_mlx(package: str) -> None:
    """A front-end never imports mlx, by whatever way; a worker does when it opens the model."""
    script = f"import {package}, sys; print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm')])"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"


def test_a_worker_on_the_fake_engine_starts_without_numpy() -> None:
    """A quarter of the time of its start, for vectors that it may never make; tests start hundreds."""
    modules = "zmqengine.worker.main, zmqengine.engine.fake.fake_engine, zmqengine.engine.fake.fake_tokenizer"
    script = f"import {modules}, sys; print('numpy' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "False"


def test_no_lock_is_near_mlx() -> None:
    """vllm-mlx #8 review: a nested lock deadlocked streaming. The engine knows no threads, so it needs no lock.

    Those that write files of prompts and of compiled kernels get bytes: what they import is tested above."""
    threaded = {
        "/fake_engine.py", "/fake_faults.py", "/disk/directory.py", "/disk/write_thread.py", "/cuda/kernel_cache.py",
    }  # fmt: skip
    for name, path in sources():
        if name.startswith("zmqengine/engine/") and not name.endswith(tuple(threaded)):
            found = {imported.split(".")[0] for imported in imports(path)}
            assert not found & {"threading", "asyncio", "concurrent", "multiprocessing"}, name


def test_no_stream_is_made_or_entered() -> None:
    """smg #1427 C, omlx #1304: no redundant wrapper and no module-level stream; MLX's own default serves one thread."""
    for name, path in sources():
        if name.startswith(("zmqengine/engine/", "zmqengine/worker/")):
            used = {
                node.attr for node in ast.walk(module_graph.tree(path)) if isinstance(node, ast.Attribute)
            }
            assert not used & {"stream", "new_stream", "set_default_stream", "new_thread_local_stream"}, name
