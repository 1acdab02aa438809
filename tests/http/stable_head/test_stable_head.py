"""What makes the prompts of a conversation begin alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zmqengine_http.stable_head import AnswerMemory, StableHead

BILLING = "x-anthropic-billing-header: cc_version=2.1.112.b02; cc_entrypoint=cli; cch=0f3a1;"


def countdown(tokens: int) -> str:
    return f"<total_tokens>{tokens:012d} tokens left</total_tokens>"


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, object]:
    return {"role": "system", "content": text}


def calls(*ids: str, **arguments: object) -> dict[str, object]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": "look", "arguments": arguments}}
            for id_ in ids
        ],
    }


def result(id_: str, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def tool(name: str, **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture
def head() -> StableHead:
    return StableHead(AnswerMemory())


def test_the_billing_line_goes_and_the_rest_of_the_system_prompt_stays(head: StableHead) -> None:
    """It differs from request to request, at the very start of the prompt."""
    made = head.normalize([system(f"{BILLING}\n\nYou are an agent."), user("hi")], [])
    assert made.messages == [system("You are an agent."), user("hi")]
    assert made.changes.billing_lines == 1


def test_a_system_message_that_is_only_a_billing_line_goes(head: StableHead) -> None:
    """An empty system message would be a change too."""
    assert head.normalize([system(BILLING), user("hi")], []).messages == [user("hi")]


@pytest.mark.parametrize(
    "text", ["You are x-anthropic-billing-header: b", "Say\nx-anthropic-billing-header: b"]
)
def test_only_a_line_at_the_start_is_a_billing_line(head: StableHead, text: str) -> None:
    """Somebody may speak of it."""
    made = head.normalize([system(text), user(BILLING)], [])
    assert made.messages == [system(text), user(BILLING)]
    assert not made.changes.facts()


def test_countdowns_go_from_system_prompts_and_where_they_stand_alone(head: StableHead) -> None:
    """In the system prompt, and as a message of its own after each tool result, under either role."""
    messages = [
        system(f"Be brief.\n{countdown(900)}\nUse tools."),
        user("go"),
        calls("c1"),
        result("c1", "seen"),
        system(countdown(800)),
        user(f"<system-reminder>\n{countdown(800)}\n</system-reminder>"),
    ]
    made = head.normalize(messages, [])
    assert made.messages == [system("Be brief.\nUse tools."), user("go"), calls("c1"), result("c1", "seen")]
    assert made.changes.countdowns == 3


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"a \t{countdown(1)} \t\nb", "ab"),
        (f"a  {countdown(1)}  {countdown(2)}\n\nb", "a\nb"),
        (f"  x{countdown(1)}", "  x"),
        ("a <total_tokens>" + "1" * 81 + "</total_tokens> b", None),
        ("a <total_tokens>1 b", None),
    ],
)
def test_a_countdown_goes_with_the_blanks_around_it(head: StableHead, text: str, left: str | None) -> None:
    """And with one line break behind it, so that the lines around it are as they were."""
    made = head.normalize([system(text), user("hi")], []).messages
    assert made[0] == system(text if left is None else left)


@pytest.mark.parametrize("opening", ["", " <system-reminder> "])
@pytest.mark.parametrize("closing", ["", "\n</system-reminder>\n"])
def test_a_users_message_of_a_countdown_alone_goes(head: StableHead, opening: str, closing: str) -> None:
    """In a reminder, in half of one, or bare."""
    messages = [system("s"), user(f"{opening}{countdown(1)}{closing}"), user("hi")]
    assert head.normalize(messages, []).messages == [system("s"), user("hi")]


def test_a_user_who_speaks_of_a_countdown_is_left_alone(head: StableHead) -> None:
    """And so is what a tool read from a file."""
    messages = [user(f"What is {countdown(5)}?"), calls("c1"), result("c1", countdown(7))]
    assert head.normalize(messages, []).messages == messages


def test_later_system_messages_stay_in_place_as_marked_user_turns(head: StableHead) -> None:
    """Moved to the head they would change it; most templates refuse them where they are."""
    messages = [system("a"), {"role": "developer", "content": "b"}, user("1"), system("plan mode"), user("2")]
    made = head.normalize(messages, [])  # type: ignore[arg-type]
    assert made.messages == [
        system("a\n\nb"),
        user("1"),
        user("<system-reminder>\nplan mode\n</system-reminder>"),
        user("2"),
    ]
    assert made.changes.system_turns == 1


def test_a_system_message_between_calls_and_results_follows_the_results(head: StableHead) -> None:
    """Templates want results right after their calls."""
    marked = user("<system-reminder>\nhurry\n</system-reminder>")
    messages = [user("1"), calls("a", "b"), system("hurry"), result("a", "x"), result("b", "y"), user("2")]
    made = head.normalize(messages, [])
    assert made.messages == [
        user("1"), calls("a", "b"), result("a", "x"), result("b", "y"), marked, user("2"),
    ]  # fmt: skip
    unanswered = [user("1"), calls("a", "b"), result("a", "x"), system("hurry"), user("2")]
    assert head.normalize(unanswered, []).messages == [
        user("1"), calls("a", "b"), result("a", "x"), marked, user("2"),
    ]  # fmt: skip


def test_what_is_marked_already_is_not_marked_twice(head: StableHead) -> None:
    """Claude Code marks some of them itself."""
    text = "<system-reminder>\nnote\n</system-reminder>"
    assert head.normalize([user("1"), system(text)], []).messages == [user("1"), user(text)]


def test_tools_and_their_keys_come_in_one_order(head: StableHead) -> None:
    """Two orders of the same tools are one prompt; lists keep theirs, for it has a meaning."""
    one = [
        tool("b", type="object", properties={"y": {"type": "string"}, "x": {}}, required=["y", "x"]),
        tool("a"),
    ]
    other = [
        tool("a"),
        tool("b", required=["y", "x"], properties={"x": {}, "y": {"type": "string"}}, type="object"),
    ]
    first, second = head.normalize([], one), head.normalize([], other)
    assert json.dumps(first.tools) == json.dumps(second.tools)
    assert first.changes.reordered == second.changes.reordered == 1
    assert head.normalize([], first.tools).changes.reordered == 0
    assert '"required": ["y", "x"]' in json.dumps(first.tools)


def test_reasoning_that_a_client_dropped_is_put_back(head: StableHead) -> None:
    """By the call it led to; what a client says itself stands."""
    head.memory.remember("c1", "I should look.", '{"path": "a"}')
    made = head.normalize([user("1"), calls("c1", path="a"), result("c1", "x")], [])
    assert made.messages[1]["reasoning_content"] == "I should look."
    assert made.changes.restored == 1
    own = {**calls("c1", path="a"), "reasoning_content": "mine"}
    assert head.normalize([own], []).messages == [own]


def test_arguments_get_their_order_back_but_never_other_values(head: StableHead) -> None:
    """A client that edits a call means it."""
    head.memory.remember("c1", "", '{"path": "a", "line": {"to": 2, "from": 1}}')
    shuffled = calls("c1", line={"from": 1, "to": 2}, path="a")
    made = head.normalize([shuffled], [])
    assert '{"path": "a", "line": {"to": 2, "from": 1}}' in json.dumps(made.messages)
    edited = calls("c1", line={"from": 1, "to": 3}, path="a")
    assert head.normalize([edited], []).messages == [edited]


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    """By bytes, whatever the number of calls."""
    memory = AnswerMemory(bytes_max=3000)
    for number in range(20):
        memory.remember(f"c{number}", "r" * 500, "{}")
    assert len(memory) == 3
    assert memory.restore([calls("c19")])[1] == 1
    assert memory.restore([calls("c0")])[1] == 0


def test_off_everything_is_as_it_was_sent() -> None:
    """The option is there for whoever finds a cure worse than the disease."""
    head = StableHead(AnswerMemory(), enabled=False)
    messages = [system(f"{BILLING}\nx"), user("1"), system("y")]
    tools = [tool("b"), tool("a")]
    made = head.normalize(messages, tools)
    assert (made.messages, made.tools, made.changes.facts()) == (messages, tools, {})


def test_nothing_is_changed_in_place(head: StableHead) -> None:
    """The request is the client's; what was done is said."""
    messages: list[dict[str, Any]] = [system(f"{BILLING}\nx"), user("1"), system("y")]
    before = json.dumps(messages)
    assert head.normalize(messages, []).changes.facts() == {"billing_lines": 1, "system_turns": 1}
    assert json.dumps(messages) == before
