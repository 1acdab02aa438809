"""`zmqengine completion`: commands and options completed by the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes `zmqengine` in SHELL.

    \b
    bash  eval "$(zmqengine completion bash)"       in ~/.bashrc
    zsh   eval "$(zmqengine completion zsh)"        in ~/.zshrc
    fish  zmqengine completion fish | source        in ~/.config/fish/config.fish
    """
    root = click.get_current_context().find_root()
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(root.command, {}, "zmqengine", "_ZMQENGINE_COMPLETE").source())
