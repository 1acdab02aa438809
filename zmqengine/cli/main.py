"""`zmqengine`: dispatches to the command, and reports every failure on one line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from zmqengine import __version__
from zmqengine.cli.advice import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, exit_code_of, one_line
from zmqengine.errors import ZmqEngineError

COMMANDS = {
    "serve": "Serve many models: each is loaded when it is asked for.",
    "worker": "Run a worker: load a model and share it.",
    "generate": "Continue a text.",
    "chat": "Talk with the model.",
    "decide": "Answer questions by the probabilities of given answers.",
    "embed": "Turn texts into vectors.",
    "status": "Show state and load of a worker.",
    "top": "Watch workers: requests, rates, memory.",
    "metrics": "Serve the metrics of workers to Prometheus.",
    "doctor": "Diagnose this machine, a model and a worker.",
    "models": "List the models of this machine.",
    "pull": "Fetch a model from the hub.",
    "adapters": "Load and unload LoRA adapters of a worker.",
    "warm": "Prefill a prompt and keep it in the prefix cache.",
    "drain": "Let a worker finish its requests, then end it.",
    "demo": "See two programs share one worker.",
    "http": "Serve the OpenAI and Anthropic APIs in front of workers.",
    "smg": "Be an engine of the SMG gateway.",
    "launch": "Point an agent at a front-end: Claude Code, Codex and others.",
    "bench": "Measure workers and other servers.",
    "conformance": "Try every rule of the protocol on a worker.",
    "keygen": "Make the keys for workers on a network.",
    "completion": "Print the script that completes commands in a shell.",
}


class Commands(click.Group):
    """Commands by name, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of installed commands, the common ones first."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"zmqengine.cli.commands.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"zmqengine.cli.commands.{cmd_name}")
        command = getattr(module, cmd_name, None)
        assert isinstance(command, click.Command), f"{module.__name__} has no command {cmd_name!r}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command, or click's error with the commands that are spelt alike."""
        alike = difflib.get_close_matches(args[0], self.list_commands(ctx))
        if alike and args[0] not in self.list_commands(ctx):
            raise click.UsageError(f"No such command {args[0]!r}: did you mean {' or '.join(alike)}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, without importing any."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name]) for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of `--help`, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="First time here? Try: zmqengine demo",
)
@click.version_option(__version__, prog_name="zmqengine")
def zmqengine() -> None:
    """Share one GPU between many programs: an MLX inference worker that speaks ZeroMQ."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. `ZMQENGINE_DEBUG=1` shows tracebacks."""
    _complete_streams()
    try:
        code = zmqengine.main(args=arguments, prog_name="zmqengine", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader of our output has closed its end: drop buffered output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # A class of click 8.2 and later; earlier ones print the help themselves.
            click.echo(error.format_message(), err=True)
            return EXIT_USAGE
        return _fail(_usage_line(error), EXIT_USAGE if isinstance(error, click.UsageError) else EXIT_FAILED)
    except ZmqEngineError as error:
        return _fail(one_line(error), exit_code_of(error))
    except ImportError as error:
        return _fail(f"{error}: install the missing packages, as README.md says", EXIT_FAILED)
    except OSError as error:
        reason = error.strerror or str(error)
        return _fail(f"{error.filename}: {reason}" if error.filename else reason, EXIT_FAILED)
    except Exception as error:  # noqa: BLE001 - the border to a person: a line, not a traceback
        return _fail(
            f"unexpected {type(error).__name__}: {error} (ZMQENGINE_DEBUG=1 shows where)", EXIT_FAILED
        )


def _complete_streams() -> None:
    """Open the null device for each standard stream that is closed, and have any text written in any encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor, so that of the stream: a socket there would get what libraries print.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # As standard error does it: an answer goes on after a character that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")


def _usage_line(error: click.ClickException) -> str:
    line = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        return f"{error.message.rstrip('.')}: did you mean {' or '.join(sorted(error.possibilities))}?"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        line = f"{line.rstrip('.')}: see {error.ctx.command_path} --help"
    return line


def _fail(line: str, code: int) -> int:
    if os.environ.get("ZMQENGINE_DEBUG"):
        traceback.print_exc()
    click.echo("zmqengine: " + " ".join(line.split()), err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
