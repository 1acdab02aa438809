"""Histories as clients send them, over all four APIs: no call of the past ends a session."""

from __future__ import annotations

import pytest

from tests.http.prompt.test_template_messages import assistant, call, rendered, result, user
from zmqengine_client.text.chats.history import history_arguments, order_results, rename_ids

EACH_ID = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.id }}]{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("{'a': True}", {"a": True}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": "[1]"}),
        ("3", {"arguments": "3"}),
        ("[" * 10_000, {"arguments": "[" * 10_000}),
    ],
)
def test_arguments_of_a_history_are_an_object(given: object, arguments: dict[str, object]) -> None:
    """Templates iterate over it."""
    assert history_arguments(given) == arguments


def order(*ids: str) -> str:
    """The order of results that came as `ids`, behind calls of a, b and c."""
    calls = assistant(call("a"), call("b"), call("c"))
    return "".join(
        str(each["content"]) for each in order_results([calls, *(result(id_, id_) for id_ in ids)])[1:]
    )


def test_results_are_ordered_by_their_ids() -> None:
    """A result of an unknown id belongs to the call that is left."""
    assert order("c", "a", "b") == "abc"
    assert order("b") == "b"
    assert order("c", "x", "a") == "axc"
    assert order("x", "y", "z") == "xyz"
    assert order("a", "b", "c", "a", "x") == "abcax"


def test_results_keep_to_their_turn() -> None:
    """The same id in two turns is two calls."""
    turns = [assistant(call("1")), result("1", "one"), assistant(call("1")), result("1", "two"), user("x")]
    assert order_results(turns) == turns


def test_two_calls_of_one_id_keep_their_results() -> None:
    """Some servers give every call the id 0."""
    turns = [assistant(call("0"), call("0")), result("0", "one"), result("0", "two")]
    assert order_results(turns) == turns
    renamed = rename_ids(turns, "functions.{name}:{index}")
    assert [each["tool_call_id"] for each in renamed[1:]] == ["functions.add:0", "functions.add:1"]


@pytest.mark.parametrize(
    ("marker", "ids"),
    [
        ("<|tool_calls_section_begin|>", ["functions.add:0", "functions.add:1", "functions.add:2"]),
        ("[TOOL_CALLS]", ["000000000", "000000001", "000000002"]),
    ],
)
def test_ids_are_those_that_the_model_writes(marker: str, ids: list[str]) -> None:
    """Kimi K2's name the function, and its template writes nothing else of it; Mistral's have nine characters."""
    turns = [
        user("Go."), assistant(call("x"), call("y")), result("y", "Y"), result("x", "X"),
        assistant(call("z")), result("z", "Z"),
    ]  # fmt: skip
    one, two, three = ids
    assert rendered("{# " + marker + " tool_calls #}" + EACH_ID, *turns) == (
        f"<user>Go.<assistant>[{one}][{two}]<tool>X{one}<tool>Y{two}<assistant>[{three}]<tool>Z{three}"
    )


def test_a_developer_is_known_where_a_role_is_compared_with_it() -> None:
    """The word is in the prose of some templates, which skip the role."""
    says: dict[str, object] = {"role": "developer", "content": "RULES"}
    loop = (
        "{% for m in messages %}{% if m.role in ROLES %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    prose = "You help 'developer's and \"developer\"s."
    old = prose + loop.replace("ROLES", "['system', 'user']")
    assert rendered(old, says, user("Hi")) == prose + "<system>RULES<user>Hi"
    known = loop.replace("ROLES", "['developer', 'user']")
    assert rendered(known, says, user("Hi")) == "<developer>RULES<user>Hi"
    refusing = "{% if messages[0].role == 'developer' %}{{ raise_exception('no') }}{% endif %}" + loop
    assert (
        rendered(refusing.replace("ROLES", "['system', 'user']"), says, user("Hi")) == "<system>RULES<user>Hi"
    )
