"""docs/how-to-add.md is true: each fact of an option, a parameter, an endpoint, an error or a command has one home."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from zmqengine import errors
from zmqengine.cli.advice import one_line
from zmqengine.cli.config_flags import flags_of
from zmqengine.cli.flags import given
from zmqengine.config import WorkerConfig
from zmqengine.errors import ConfigError, ZmqEngineError
from zmqengine.option import option, options_of
from zmqengine.protocol import messages
from zmqengine.sampling_params import Sampling, SamplingOptions
from zmqengine_client import Options
from zmqengine_client import errors as client_errors
from zmqengine_http.config import HttpConfig
from zmqengine_http.endpoints import ENDPOINTS
from zmqengine_http.serving.errors import from_engine

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to-add.md").read_text("utf-8")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for package in ("zmqengine", "clients")
    for path in sorted((ROOT / package).rglob("*"))
    if path.suffix == ".py" or path.name == "SPEC.md"
}
# These use parameters as anybody may, and `temperature` is a word of stories as well.
USERS = (
    "zmqengine/pico/",
    "zmqengine/bench/",
    "zmqengine/conformance/",
    "zmqengine/cli/commands/demo/front_end.py",
)


def section(title: str) -> str:
    """The text below a heading of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def files_of(text: str) -> set[str]:
    """The files that a text names."""
    return set(re.findall(r"`((?:zmqengine|clients)/[\w/]+\.(?:py|md))`", text))


@functools.cache
def words_of(name: str) -> frozenset[str]:
    """What the code of a file names: identifiers, keywords, whole texts. Comments may say anything."""
    if name.endswith(".md"):
        return frozenset(re.findall(r"\w+", SOURCES[name]))
    found: set[str] = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word):
                found.add(word)
            case ast.arg(arg=word) | ast.Constant(value=str(word)) | ast.keyword(arg=str(word)):
                found.add(word)
    return frozenset(found)


def spelled(word: str) -> set[str]:
    """The files that name it, those of users apart."""
    return {name for name in SOURCES if word in words_of(name) and not name.startswith(USERS)}


def test_the_files_that_are_named_exist() -> None:
    """Every one, and there are walks to check."""
    assert len(files_of(PAGE)) > 20
    for name in files_of(PAGE):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", Sampling.__struct_fields__)
def test_a_sampling_parameter_is_spelled_only_where_the_page_says(name: str) -> None:
    """The record, the engine and SPEC.md; and of those that another API gives another form, what translates it."""
    steps, _, translations = section("A sampling parameter").partition("An API that gives it another form")
    engine = {"zmqengine/engine/sampling/draw.py", "zmqengine/engine/sampling/penalties.py"}
    # It may name its columns as it likes.
    kernel = {"zmqengine/engine/cuda/draw_kernel.py"}
    if name == "top_k":
        # mlx-lm's mixtures of experts call the number of those that they choose so.
        kernel |= {
            f"zmqengine/engine/models/families/{family}.py"
            for family in ("deepseek", "llama", "glm4_moe", "lfm2", "qwen_next")
        }
    found = spelled(name) - kernel
    assert len(found & engine) == 1
    assert found >= files_of(steps) - engine - kernel
    if name in ("temperature", "top_p", "top_k", "logit_bias", "repetition_penalty", "min_tokens"):
        assert found <= files_of(steps) | files_of(translations)
    else:
        assert found <= files_of(steps)


def test_the_kernel_that_draws_is_not_used_for_what_it_does_not_know() -> None:
    """The kernel's plan reads every parameter that the plain draw reads: else one would be skipped on CUDA alone."""
    plain = ast.parse(SOURCES["zmqengine/engine/sampling/draw.py"])
    helpers = {"inverse_temperature", "top_k_of", "_parameters"}
    functions = {node.name: node for node in plain.body if isinstance(node, ast.FunctionDef)}
    cuda = ast.parse(SOURCES["zmqengine/engine/cuda/draw_kernel.py"])
    kernel = next(node for node in cuda.body if isinstance(node, ast.ClassDef) and node.name == "KernelPlan")
    used = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name)} & helpers
    read = _parameters(*(functions[name] for name in helpers))
    assert read >= {"temperature", "top_p", "top_k", "min_p"}
    assert read <= _parameters(kernel, *(functions[name] for name in used))


def _parameters(*nodes: ast.AST) -> set[str]:
    read = {each.attr for node in nodes for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return read & set(Sampling.__struct_fields__)


def test_the_keywords_of_the_client_are_the_parameters_of_the_record() -> None:
    """The one list beside the record stands below it, and has the same names."""
    assert tuple(SamplingOptions.__annotations__) == Sampling.__struct_fields__
    assert SamplingOptions.__annotations__.keys() <= Options.__annotations__.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wider(WorkerConfig):
    """A worker with one option more; this class is all that was written for it."""

    patience_s: float = option(1.5, within=(0.5, 10), help="How long it is patient.")
    spare_bytes: int = option(4096, within=(1024, 1 << 20), help="Memory to spare.")


def test_a_new_option_is_one_declaration() -> None:
    """Flag, help, default, environment, bounds and the way to a child process."""
    seen: list[Wider] = []

    @flags_of(Wider)
    @click.command(context_settings={"auto_envvar_prefix": "WIDER"})
    def command(**values: object) -> None:
        seen.append(Wider(**given(values)))  # type: ignore[arg-type]

    run = CliRunner().invoke
    told = " ".join(run(command, ["--help"]).output.split())
    assert "--patience SECONDS How long it is patient. [default: 1.5]" in told
    assert "--spare-bytes SIZE Memory to spare. [default: 4K]" in told
    assert (
        run(command, ["--patience", "2", "--queue-max", "5"], env={"WIDER_SPARE_BYTES": "8K"}).exit_code == 0
    )
    assert seen == [Wider(patience_s=2.0, queue_max=5, spare_bytes=8192)]
    assert Wider.from_json(seen[0].to_json()) == seen[0]
    refused = run(command, ["--patience", "11"]).exception
    assert isinstance(refused, ConfigError)
    assert str(refused) == "--patience is 11.0: it must be from 0.5 to 10"


@pytest.mark.parametrize(
    ("config", "homes"),
    [
        (WorkerConfig, ["zmqengine/config.py", "zmqengine/engine/options.py"]),
        (HttpConfig, ["clients/zmqengine_http/config.py"]),
    ],
)
def test_an_option_is_declared_once_and_read_somewhere(config: type, homes: list[str]) -> None:
    """The command line names none of them, and there is none that nobody reads."""
    assert set(homes) <= files_of(section("A worker option"))
    names = ("commands/worker", "commands/http", "config_flags")
    commands = "".join(SOURCES[f"zmqengine/cli/{name}.py"] for name in names)
    for each in options_of(config):
        declared = [
            home
            for home in homes
            if re.search(rf"^    {each.name}: .+ = option\(", SOURCES[home], re.MULTILINE)
        ]
        assert len(declared) == 1, each.name
        assert f'"{each.flag}' not in commands, each.flag
        reads = re.compile(rf"(?:config|options|self)\.{each.name}\b")
        assert any(reads.search(text) for text in SOURCES.values()), f"nothing reads {each.name}"


def test_an_endpoint_is_a_module_and_a_line() -> None:
    """Its path stands in that module alone; nothing else of the front-end has a table of paths."""
    own = {"/", "/health", "/ready", "/metrics", "/status", "/docs"}
    for endpoint in ENDPOINTS:
        if endpoint.path not in own:
            homes = [
                name
                for name, text in SOURCES.items()
                if name.startswith("clients/zmqengine_http/") and f'"{endpoint.path}"' in text
            ]
            assert len(homes) == 1, (endpoint.path, homes)


class TooHot(errors.Unavailable):
    """The chip is too hot; let it rest."""

    code = "too_hot"


def test_a_new_code_is_known_everywhere_by_the_class_above_it() -> None:
    """HTTP status, advice and the client's catalogue need no line of their own."""
    over_http = from_engine(TooHot("it glows", retry_after_ms=2000))
    assert (over_http.status, over_http.code, over_http.retry_after_ms) == (503, "too_hot", 2000)
    assert one_line(TooHot("it glows", retry_after_ms=2000)) == "it glows; try again in 2 s"
    classes = {name for name, _ in inspect.getmembers(errors, _is_error)}
    assert classes == {name for name, _ in inspect.getmembers(client_errors, _is_error)}


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ZmqEngineError)


@pytest.mark.parametrize(
    ("union", "handler", "elsewhere"),
    [
        (
            messages.Command,
            "zmqengine/worker/intake/commands.py",
            {"Hello", "Insert", "Image", "Embed", "Resume", "Ping"},
        ),
        (messages.ControlRequest, "zmqengine/worker/intake/control.py", {"Ping"}),
    ],
)
def test_a_command_is_named_by_the_wire_and_its_handler(
    union: object, handler: str, elsewhere: set[str]
) -> None:
    """In the worker by no other file."""
    for kind in get_args(union):
        found = {
            name
            for name in spelled(kind.__name__)
            if name.startswith(("zmqengine/protocol/", "zmqengine/worker/")) and name.endswith(".py")
        }
        assert found >= {"zmqengine/protocol/messages.py", handler}
        if kind.__name__ not in elsewhere:
            assert found == {"zmqengine/protocol/messages.py", handler}, kind
