"""The command line before any command runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from zmqengine import errors
from zmqengine.cli import main as command_line
from zmqengine.cli.advice import one_line
from zmqengine.cli.main import COMMANDS, Commands, main
from zmqengine.errors import ZmqEngineError

CLOSED_STREAMS = """
import subprocess, sys
from zmqengine.cli.main import main
assert main(["--version"]) == 0
sys.stdin.read(0), sys.stdout.write(""), sys.stderr.write("")
child = "import os, sys; open(sys.argv[1], 'w').write(' '.join(str(n) for n in range(3) if os.fstat(n)))"
subprocess.run([sys.executable, "-c", child, sys.argv[1]], check=True)
"""
HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "zmqengine.worker.actor")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["status", "--help"], ["chat", "--help"], ["worker", "--help"]]
)
def test_a_light_command_imports_nothing_heavy(arguments: list[str]) -> None:
    """`zmqengine status` must not wait for MLX, nor need it."""
    program = f"""
import sys
from zmqengine.cli.main import main
code = main({arguments!r})
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-1] == "[]"


def test_help_lists_every_command_that_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """The list is made without importing one."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("worker", "generate", "chat", "status", "drain", "demo"):
        assert f"  {name} " in shown
        assert COMMANDS[name] in shown


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_a_group_without_a_command_shows_its_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of a group spans lines, and is no error of one line."""
    main(arguments)
    shown = "".join(capsys.readouterr())
    assert shown.startswith("Usage: zmqengine")
    assert len(shown.splitlines()) > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wurst"], "No such command 'wurst': see zmqengine --help"),
        (["worker", "--wurst"], "No such option"),
        (["worker", "--rows-max", "many"], "Invalid value for '--rows-max'"),
        (["worker", "--memory-limit", "much"], "'much' is not a size: write it like 512M or 2G"),
        (["worker", "--rows-max", "0"], "--rows-max is 0: it must be from 1 to 4096"),
        (["worker", "--bind", "tcp://0.0.0.0:1"], "make keys with `zmqengine keygen`"),
        (["status", "--worker", "a b"], "'a b' is not a worker address"),
        (["status", "--timeout", "nan"], "Invalid value for '--timeout': 'nan' is not a number of seconds"),
        (["status", "--timeout", "inf"], "Invalid value for '--timeout': inf is not in the range"),
        (["serve", "--gateway", "foo"], "'foo' is not a URL such as http://HOST:30000"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong, and where to look."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("zmqengine: ")
    assert len(err.splitlines()) == 1


def test_no_option_takes_nan_for_a_time() -> None:
    """No comparison with NaN holds, so a wait until then never ends."""
    context, tried = click.Context(command_line.zmqengine), 0
    for name in COMMANDS:
        command = command_line.zmqengine.get_command(context, name)
        assert command is not None, name
        for option in command.params:
            if isinstance(option.type, click.FloatRange):
                tried += 1
                with pytest.raises(click.BadParameter, match="not a number of seconds"):
                    option.type_cast_value(context, "nan")
    assert tried


class Failing(Commands):
    """A group whose every command fails."""

    error: BaseException = RuntimeError("two\nlines")

    def invoke(self, ctx: object) -> object:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("two\nlines"), 1, "unexpected RuntimeError: two lines (ZMQENGINE_DEBUG=1 shows where)"),
        (errors.ModelLoadError("no such model"), 1, "no such model; check --model"),
        (errors.ConfigError("change this"), 2, "change this"),
        (errors.WorkerLost("no worker at x."), 1, "no worker at x; start a worker with `zmqengine worker`"),
        (errors.Overloaded("full", retry_after_ms=2100), 1, "full; try again in 2 s"),
        (OSError(28, "No space left on device"), 1, "zmqengine: No space left on device"),
        (
            FileNotFoundError(2, "No such file or directory", "/no/x"),
            1,
            "zmqengine: /no/x: No such file or directory",
        ),
        (ImportError("No module named 'x'"), 1, "install the missing packages"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_is_one_line_without_a_traceback(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is raised, a person reads what happened and what to do."""
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(command_line, "zmqengine", Failing("zmqengine"))
    monkeypatch.delenv("ZMQENGINE_DEBUG", raising=False)
    assert main(["status"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_the_traceback_is_there_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZMQENGINE_DEBUG=1."""
    monkeypatch.setattr(command_line, "zmqengine", Failing("zmqengine"))
    monkeypatch.setenv("ZMQENGINE_DEBUG", "1")
    assert main(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("kind", sorted(set(errors.BY_CODE.values()), key=lambda kind: kind.__name__))  # type: ignore[attr-defined]
def test_every_error_becomes_one_line(kind: type[ZmqEngineError]) -> None:
    """No error of ours is left without words."""
    line = one_line(kind("it went wrong."))
    assert line.startswith("it went wrong")
    assert "\n" not in line


def test_output_that_nobody_reads_ends_quietly() -> None:
    """`zmqengine --help | head -0` shows no traceback."""
    program = "import sys; from zmqengine.cli.main import main; sys.exit(main(['worker', '--help']))"
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait() == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_the_null_device(closed: str, tmp_path: Path) -> None:
    """A program started without them neither fails nor gives their numbers to sockets, nor do its children."""
    run = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, CLOSED_STREAMS, tmp_path / "children"],
        check=False,
    )
    assert run.returncode == 0
    assert (tmp_path / "children").read_text() == "0 1 2"


def test_a_character_that_the_encoding_lacks_does_not_end_an_answer() -> None:
    """It is written as standard error writes it."""
    program = (
        "import sys, click; from zmqengine.cli.main import main; main(['--version']); click.echo('a\u20acb')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.endswith("a\\u20acb\n")


@pytest.mark.parametrize(("typed", "meant"), [("chta", "chat"), ("serv", "serve"), ("staus", "status")])
def test_a_command_that_is_misspelt_is_suggested(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options had a suggestion, commands had none."""
    assert main([typed]) == 2
    assert f"No such command '{typed}': did you mean {meant}" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script names the command; what it asks for is answered without importing every command."""
    assert main(["completion", shell]) == 0
    assert "_ZMQENGINE_COMPLETE" in capsys.readouterr().out
    words = {"bash": "bash_complete", "zsh": "zsh_complete", "fish": "fish_complete"}[shell]
    word = "st" if shell == "fish" else "1"
    asked = {"_ZMQENGINE_COMPLETE": words, "COMP_WORDS": "zmqengine st", "COMP_CWORD": word}
    ran = subprocess.run(
        [sys.executable, "-m", "zmqengine.cli.main"],
        env=os.environ | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "status" in ran.stdout
