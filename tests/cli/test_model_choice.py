"""The model that answers where none was named, and words that are a name or a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from zmqengine.cli.commands.chat import model_choice
from zmqengine.cli.commands.chat.model_choice import first_choice, split_question
from zmqengine.cli.flags import WorkerTarget
from zmqengine.protocol.launcher import ModelEntry


def entry(name: str, **more: Any) -> ModelEntry:
    """A model that chats and is not loaded, of a path like its name."""
    return ModelEntry(
        name, more.pop("state", "unloaded"), "", **{"path": name, "capabilities": ["completion"], **more}
    )


PICO, TOOLS, EYE = (
    entry("pico", need_bytes=80),
    entry("pico-tools", need_bytes=90),
    entry("pico-eye", need_bytes=400),
)
EMBED = entry("pico-embed", capabilities=["embedding"], need_bytes=900)
SMALL, LARGE = entry("small", need_bytes=4_000), entry("large", need_bytes=9_000)
HUGE = entry("huge", need_bytes=90_000, never="huge needs 84 GiB and there are 16 GiB")


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ([EMBED, EYE, TOOLS, PICO], "pico"),
        ([PICO, SMALL, LARGE, HUGE], "large"),
        ([PICO, LARGE, entry("small", need_bytes=1, loads=2)], "small"),
        ([LARGE, entry("pico", state="ready")], "pico"),
        ([entry("pico-embed", state="ready", capabilities=["embedding"]), PICO], "pico"),
        ([EMBED, HUGE], None),
    ],
)
def test_the_first_choice_answers_soon_or_well(models: Sequence[ModelEntry], chosen: str | None) -> None:
    """A loaded model, then one that was used, then the largest that fits; a toy where there is nothing else."""
    assert first_choice(models) == chosen


@pytest.mark.parametrize(
    ("words", "model", "question"),
    [
        ([], "pico", []),
        (["Hello"], "pico", ["Hello"]),
        (["Tell me a story."], "pico", ["Tell me a story."]),
        (["-"], "pico", ["-"]),
        (["pico-eye"], "pico-eye", []),
        (["picoo"], "picoo", []),
        (["nosuch", "Hello"], "nosuch", ["Hello"]),
        (["pico-eye", "Hello"], "pico-eye", ["Hello"]),
    ],
)
def test_one_word_is_a_question_unless_it_is_spelt_like_a_model(
    monkeypatch: pytest.MonkeyPatch, words: list[str], model: str, question: list[str]
) -> None:
    """`zmqengine chat Hello` said that there is no model of this name."""
    models = [PICO, TOOLS, EYE]
    monkeypatch.setattr(model_choice, "stand_in", lambda: "ipc:///launcher")
    target = WorkerTarget(None)
    chosen, asked = split_question(target, words, models)
    assert (chosen.model, asked) == (model, question)
    assert split_question(WorkerTarget("a-worker"), words, models) == (WorkerTarget("a-worker"), words)
