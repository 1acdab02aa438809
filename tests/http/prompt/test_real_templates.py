"""Chat templates of real models, tried one by one: what each family writes is read back, whatever is in it.

`ZMQENGINE_TEST_TEMPLATES` names a directory with further files `*.jinja`, and CONTRIBUTING.md says where such are. A
template may have a neighbour `NAME.json` with the facts of its model's worker.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from tests.support.template_trial import (
    CONTENT,
    EMPTY,
    HARD,
    REASONING,
    SIMPLE,
    SYSTEM,
    TIME,
    TOOLS,
    USER,
    Called,
    Message,
    NotComparable,
    assistant,
    model_of,
    prompt_text,
    read,
    results,
    turn_of,
)
from zmqengine_http.prompt.template import takes_tools
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.workers.worker import Model

DIRECTORY = Path(os.environ.get("ZMQENGINE_TEST_TEMPLATES") or Path(__file__).parent / "chat_templates")
FILES = sorted(DIRECTORY.rglob("*.jinja"))
LOSSY = {
    "pythonic": "puts strings between quotes as they are",
    "minimax_m3": "leaves out null",
}
"""Formats of which some template cannot write every value."""

each = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(DIRECTORY)) for path in FILES])


@functools.cache
def model_at(path: Path) -> Model:
    facts = path.with_suffix(".json")
    return model_of(path.read_text(), json.loads(facts.read_text()) if facts.exists() else {})


def model_with_tools(path: Path) -> Model:
    model = model_at(path)
    if not takes_tools(model):
        pytest.skip("takes no tools")
    if not (model.markers.calls or model.markers.harmony):
        pytest.skip("writes its calls in no format that is known")
    return model


def refused(error: ApiError) -> None:
    """A refusal says what the template objects to, and is the caller's."""
    assert (error.status, bool(error.param)) == (400, True)
    pytest.skip(f"refuses it: {error.message}")


@each
def test_a_chat_becomes_a_prompt_or_a_clear_400(path: Path) -> None:
    """What the user says is in it, and what the system says where the template has a place for it."""
    try:
        text = prompt_text(model_at(path), [SYSTEM, USER], [])
    except ApiError as error:
        refused(error)
    if "USER-QUESTION" not in text:
        pytest.skip("takes parts instead of texts: for models that see or hear")


@each
def test_a_session_of_an_agent_is_all_in_the_prompt(path: Path) -> None:
    """Tools, calls, two at once among them, and their results."""
    model = model_with_tools(path)
    chat: list[Message] = [
        SYSTEM, USER, assistant([SIMPLE], CONTENT, REASONING), *results([SIMPLE]),
        assistant([SIMPLE, TIME]), *results([SIMPLE, TIME]), assistant(content="DONE."),
        {"role": "user", "content": "LAST-USER"},
    ]  # fmt: skip
    try:
        text = prompt_text(model, chat, TOOLS)
    except ApiError as error:
        refused(error)
    wanted = ("write_file", "get_time", "/tmp/a.txt", "Paris", "RESULT-0", "RESULT-1", "DONE.", "LAST-USER")
    missing = [word for word in wanted if word not in text]
    if "write_file" in missing or "RESULT-0" in missing:
        pytest.skip("has no place for tools")
    assert not missing


@each
@pytest.mark.parametrize(
    ("calls", "content", "reasoning"),
    [
        ([SIMPLE], "", ""),
        ([EMPTY], "", ""),
        ([SIMPLE, TIME], "", ""),
        ([SIMPLE], CONTENT, ""),
        ([SIMPLE], CONTENT, REASONING),
        ([HARD, TIME], CONTENT, REASONING),
    ],
    ids=["simple", "empty", "two", "said", "reasoned", "hard"],
)
def test_what_the_template_writes_is_read_back(
    path: Path, calls: list[Called], content: str, reasoning: str
) -> None:
    """The same calls, with the content and the reasoning apart from them, whole and in pieces."""
    model = model_with_tools(path)
    format_ = model.markers.calls
    if HARD in calls and format_ and format_.name in LOSSY:
        pytest.skip(f"some template of the format {LOSSY[format_.name]}")
    if format_ and format_.name == "function_gemma" and calls != [EMPTY]:
        pytest.skip("a template that is not the model's own writes numbers as strings")
    if content and format_ and format_.bare:
        pytest.skip("a call behind a text has no marker")
    try:
        turn = turn_of(model, assistant(calls, content, reasoning), calls)
    except ApiError as error:
        refused(error)
    except NotComparable as error:
        pytest.skip(str(error))
    told_reasoning, told_content, told_calls = read(model, turn)
    # Templates that take one call at a time have the next one in a turn of its own.
    assert told_calls == calls[: 1 if TIME[0] not in turn.text else None], turn.text
    wanted = [text if text in turn.text else "" for text in (reasoning, content)]
    if model.markers.harmony:
        # Its template puts what is said beside a call with the reasoning.
        assert told_reasoning + told_content == "".join(wanted), turn.text
    else:
        assert [told_reasoning, told_content] == wanted, turn.text
