"""Tools in the corpus: calls that fit what was asked, splits that do not meet, and the template that writes them."""

import json
from itertools import islice
from typing import Any

import jinja2
import pytest

from tools.pico.chat import Turn
from tools.pico.corpus import ChatDocument
from tools.pico.draw import Split, split_of
from tools.pico.template import CHAT_TEMPLATE, system_text
from tools.pico.tool import Parameter, Tool, ToolCall
from tools.pico.tools import corpus as tool_corpus
from tools.pico.tools.chat import NO_TOOL

COUNT = 800


def chats(split: Split, seed: int, count: int = COUNT) -> list[ChatDocument]:
    """The chats among the first documents of a stream."""
    documents = islice(tool_corpus.documents(split, seed), count)
    return [document for document in documents if isinstance(document, ChatDocument)]


def calling(documents: list[ChatDocument]) -> list[tuple[ChatDocument, Turn, ToolCall]]:
    """Every turn with a call, and the chat that it is in."""
    return [(chat, turn, turn.call) for chat in documents for turn in chat.turns if turn.call]


def test_a_call_names_an_offered_tool_and_gives_what_the_user_said() -> None:
    """The name is offered, each argument is a parameter of its kind, and its value stands in what was asked."""
    found = calling(chats("train", 1))
    assert len(found) > 400
    for chat, turn, call in found:
        (tool,) = [tool for tool in chat.tools if tool.name == call.name]
        parameters = {parameter.name: parameter for parameter in tool.parameters}
        arguments = json.loads(call.arguments)
        assert set(arguments) == set(parameters)
        for name, value in arguments.items():
            assert str(value) in turn.user, (turn.user, call)
            assert isinstance(value, str) == (parameters[name].kind == "string")
            assert not parameters[name].choices or value in parameters[name].choices


def test_the_answer_tells_what_the_tool_answered() -> None:
    """The fact of every turn with a call stands in the tool's answer and in the words after it."""
    for _, turn, call in calling(chats("train", 2)):
        assert turn.fact in turn.answer
        assert turn.fact in call.answer.replace('\\"', '"'), (turn, call)


def test_no_tool_is_called_where_none_fits() -> None:
    """What nobody offers a tool for is asked for too, and answered without a call."""
    turns = [turn for chat in chats("train", 3) for turn in chat.turns if turn.answer == NO_TOOL]
    assert len(turns) > 40
    assert not any(turn.call for turn in turns)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_tools_and_asks_lie_on_the_side_of_their_document(split: Split) -> None:
    """No tool and no ask of one split is one of the other."""
    documents = chats(split, 4, 300)
    keys = [tool.key for chat in documents for tool in chat.tools]
    keys += [turn.key for chat in documents for turn in chat.turns if turn.key]
    assert len(keys) > 500
    assert {split_of(key) for key in keys} == {split}


def test_objects_are_the_json_that_was_asked_for() -> None:
    """Each is one JSON object whose keys and values stand in what the user said."""
    turns = [turn for chat in chats("train", 5) for turn in chat.turns if turn.task == "JSON object"]
    assert len(turns) > 80
    for turn in turns:
        written = json.loads(turn.answer)
        assert written
        assert all(key in turn.user and str(value) in turn.user for key, value in written.items())


def test_long_documents_are_long() -> None:
    """Some documents begin with a text, or hold a history, of well over a thousand words."""
    documents = list(islice(tool_corpus.documents("train", 6, 0.05, 2500), COUNT))
    words = [len(document.text.split()) for document in documents]
    assert sum(count > 1000 for count in words) >= 3


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Through Jinja alone."""
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, tools=tools, add_generation_prompt=True)


def test_the_template_takes_schemas_of_any_kind() -> None:
    """No parameters, no description, lists of types, nothing at all: what is not there is left out."""
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "bare"}},
        {"type": "function", "function": {"name": "empty", "parameters": {"type": "object"}}},
        {
            "type": "function",
            "function": {
                "name": "many",
                "description": "Does much.",
                "parameters": {
                    "properties": {
                        "a": {"type": ["string", "null"]},
                        "b": {"anyOf": [{"type": "string"}]},
                        "c": {"enum": [1, "two"], "description": "a choice"},
                        "items": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["a"],
                },
            },
        },
    ]
    text = render([{"role": "user", "content": "Hi"}], tools)
    signature = "many(a: string|null, b?: any, c?: 1|two (a choice), items?: array)"
    assert text == (
        f"<|system|><tools>\nbare()\nempty()\n# Does much.\n{signature}\n</tools><|end|>"
        "<|user|>Hi<|end|><|assistant|>"
    )


def test_the_template_writes_calls_and_answers() -> None:
    """A call with its arguments as an object or as JSON text, two calls in one message, and both answers."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    other = {"type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": " 7 "},
    ]
    assert render(messages, None) == (
        "<|user|>Add.<|end|><|assistant|>"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|end|>'
        "<|user|><tool_response>\n3\n</tool_response><|end|>"
        "<|user|><tool_response>\n7\n</tool_response><|end|><|assistant|>"
    )


def test_the_template_joins_a_system_prompt_and_tools() -> None:
    """One system message, the prompt first; the same text as the corpus is made of."""
    tool = Tool("look_up", "Look up a word.", (Parameter("word", "string", "the word"),))
    text = render(
        [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "Hi"}], [tool.definition]
    )
    assert text == f"<|system|>{system_text('Be kind.', [tool])}<|end|><|user|>Hi<|end|><|assistant|>"
    assert text.count("<|system|>") == 1
