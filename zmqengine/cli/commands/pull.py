"""`zmqengine pull`: fetch a model from the hub."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zmqengine.checkpoint.estimate import open_checkpoint
from zmqengine.checkpoint.on_disk import HUB_ID
from zmqengine.checkpoint.weights import CheckpointError
from zmqengine.doctor.model import describe

FILES = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jinja",
)
"""Files of a model in mlx-lm's format; other formats of the same weights are not fetched."""


@click.command()
@click.argument("model", metavar="OWNER/NAME")
@click.option("--revision", metavar="REVISION", help="A branch, tag or commit.  [default: main]")
def pull(model: str, revision: str | None) -> None:
    """Fetch a model into the hub's cache, where `zmqengine worker --model OWNER/NAME` finds it.

    An interrupted download continues where it stopped. $HF_ENDPOINT, $HF_HOME and $HF_TOKEN are respected.
    """
    if not HUB_ID.fullmatch(model):
        raise click.BadParameter(f"{model!r} is not a hub id: give OWNER/NAME", param_hint="OWNER/NAME")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise click.ClickException(f"{error}: install it with pip install 'zmqengine[worker]'") from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        directory = snapshot_download(model, revision=revision, allow_patterns=list(FILES))
    except GatedRepoError:
        raise click.ClickException(
            f"{model} asks for consent: accept its terms on its page, then set $HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise click.ClickException(f"{model} has no revision {revision}: see its page for branches") from None
    except RepositoryNotFoundError:
        raise click.ClickException(
            f"the hub has no model {model}, or it is private: check the name, set $HF_TOKEN"
        ) from None
    except Exception as error:  # noqa: BLE001 - of whatever library carries the bytes: a line, not a traceback
        raise click.ClickException(
            f"fetching {model} stopped ({type(error).__name__}: {str(error)[:200]}): "
            "run it again to continue from there"
        ) from None
    try:
        click.echo(f"{model}: {describe(open_checkpoint(Path(directory)))}", err=True)
    except CheckpointError as error:
        raise click.ClickException(f"{error}; it was fetched, but no worker can load it") from None
    click.echo(str(directory))
