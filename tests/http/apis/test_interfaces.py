"""Requests of user interfaces: synonyms, fields without effect, and an assistant's message to be continued."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.http.front import post, serving, wait_until
from tests.http.scripted import THINKING_SWITCH, USER, ScriptedFront
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.apis.chat_completions.request import CHAT_BODY

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
THINKING: dict[str, str | bool | int] = {"think_start": "<think>", "think_end": "</think>"}
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
HARMONY = TURNS + "{# <|channel|> <|message|> #}"


@pytest.fixture(scope="module")
def served() -> Iterator[ScriptedFront]:
    with ScriptedFront(THINKING_SWITCH + CHAT_TEMPLATE) as served:
        yield served


@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"rep_pen": 1.5, "repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"num_predict": 7}, "max_tokens", 7),
        ({"max_new_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"n_predict": -2}, "max_tokens", None),
        ({"max_completion_tokens": -1}, "max_tokens", None),
        ({"seed": -1}, "seed", None),
    ],
)
def test_a_synonym_with_one_meaning_is_taken(
    served: ScriptedFront, fields: dict[str, object], option: str, value: object
) -> None:
    """The worker gets what the client means, and no header says that anything was ignored."""
    for reply in (served.chat(**fields), post(served.front, TEXT, {"prompt": "a", **fields})):
        if "max_completion_tokens" in fields and reply.status == 400:
            continue
        assert reply.status == 200, reply.body
        assert "x-ignored-fields" not in reply.headers
        assert served.client.options[-1].get(option) == value


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"enable_thinking": False}, "off"),
        ({"enable_thinking": True}, "on"),
        ({"think": False}, "off"),
        ({"think": "high"}, "on"),
        ({"thinking": {"type": "disabled"}}, "off"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "on"),
        ({"reasoning": {"effort": "none"}}, "off"),
        ({"reasoning": {"effort": "low"}}, "on"),
        ({"reasoning": {"enabled": False}}, "off"),
        ({"reasoning": {"exclude": True}}, "<"),
    ],
)
def test_reasoning_is_turned_on_and_off_in_every_form(
    served: ScriptedFront, fields: dict[str, object], start: str
) -> None:
    """Ollama's, DeepSeek's, OpenRouter's and Qwen's."""
    reply = served.chat(**fields)
    assert reply.status == 200, reply.body
    starts = ("off", "on")
    found = next((word for word in starts if served.client.prompts[-1].startswith(word)), "<")
    assert found == start


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 7, "max_tokens": 8}, "n_predict"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"think": [3]}, "think"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"reasoning": "high"}, "reasoning"),
        ({"mirostat": 2}, "mirostat"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 100}, "truncate_prompt_tokens"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"num_ctx": 10_000}, "num_ctx"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_field_that_would_change_the_output_is_refused_by_name(
    served: ScriptedFront, fields: dict[str, object], param: str
) -> None:
    """Rather than answered as if it had not been sent."""
    reply = served.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_fields_of_interfaces_without_effect_are_told(
    served: ScriptedFront, caplog: pytest.LogCaptureFixture
) -> None:
    """In a header by name, and in the log by number; values that change nothing are not even told."""
    with caplog.at_level("INFO", "zmqengine.http"):
        reply = served.chat(
            keep_alive="5m", cache_prompt=True, provider={"order": ["x"]}, num_ctx=2048, mirostat=0,
            typical_p=1.0, skip_special_tokens=True, ttl=300,
        )  # fmt: skip
        wait_until(lambda: _lines(caplog), "the request is logged")
    assert reply.status == 200, reply.body
    told = ["keep_alive", "cache_prompt", "provider", "ttl"]
    assert reply.headers["x-ignored-fields"] == ", ".join(told)
    assert _lines(caplog)[-1]["ignored_fields"] == len(told)


def _lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]


def test_unknown_fields_of_other_servers_are_ignored_where_the_operator_says_so() -> None:
    """Also those that would change the output."""
    with ScriptedFront(THINKING_SWITCH + CHAT_TEMPLATE, unknown_fields="ignore") as served:
        reply = served.chat(mirostat=2, colour="red")
        assert reply.status == 200
        assert reply.headers["x-ignored-fields"] == "mirostat, colour"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_enforced(kind: str) -> None:
    """llama.cpp's, Together's and Fireworks' form of a response format: the schema must not be lost."""
    schema = {"type": "object", "properties": {"x": {"const": 5}}, "required": ["x"]}
    body = {"messages": [USER], "response_format": {"type": kind, "schema": schema}}
    read = CHAT_BODY.read(msgspec.json.encode(body)).request
    constraint = read.response_format["json_schema"]
    assert isinstance(constraint, dict)
    assert constraint["schema"] == schema


# --- prefill -----------------------------------------------------------------------------------------------


def turns(content: str, **more: object) -> list[dict[str, object]]:
    return [USER, {"role": "assistant", "content": content, **more}]


def test_the_last_message_of_the_assistant_is_continued() -> None:
    """In both APIs: the prompt ends within its turn, and the answer holds the new text alone."""
    with ScriptedFront(TURNS) as served:
        reply = served.chat(messages=turns("Once upon"))
        assert served.client.prompts[-1] == "<user>Hi<assistant>Once upon"
        assert reply.json["choices"][0]["message"]["content"] == "yes"
        body = {"model": "scripted", "max_tokens": 9, "messages": turns("Once upon")}
        assert post(served.front, MESSAGES, body).json["content"][0]["text"] == "yes"
        assert served.client.prompts[-1] == "<user>Hi<assistant>Once upon"
        explicit = served.chat(
            messages=turns("Once"), continue_final_message=True, add_generation_prompt=False
        )
        assert explicit.status == 200
        assert served.client.prompts[-1] == "<user>Hi<assistant>Once"


def test_a_new_turn_after_the_assistant_is_made_where_it_is_asked_for() -> None:
    """By either of vLLM's two fields."""
    with ScriptedFront(TURNS) as served:
        for fields in ({"continue_final_message": False}, {"add_generation_prompt": True}):
            assert served.chat(messages=turns("Once"), **fields).status == 200
            assert served.client.prompts[-1] == "<user>Hi<assistant>Once<assistant>"


@pytest.mark.parametrize(
    ("template", "message", "prompt", "said", "content", "reasoning"),
    [
        (TURNS, {"content": "So"}, "So", " it is", " it is", ""),
        (TURNS, {"content": "So", "reasoning_content": "hm"}, "<think>\nhm</think>\n\nSo", " on", " on", ""),
        (TURNS, {"content": "", "reasoning_content": "hm " * 40}, "<think>\n" + "hm " * 40, "a</think>b", "b", "a"),
        (TURNS + "<think>", {"content": "So"}, "<think></think>\n\nSo", " on", " on", ""),
        (TURNS + "<think>", {"content": "", "reasoning_content": "hm"}, "<think>hm", "a</think>b", "b", "a"),
        (HARMONY, {"content": "So"}, "<|channel|>final<|message|>So", " on<|return|>", " on", ""),
        (
            HARMONY,
            {"content": "So", "reasoning_content": "hm"},
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So",
            " on",
            " on",
            "",
        ),
        (HARMONY, {"content": "", "reasoning_content": "hm"}, "<|channel|>analysis<|message|>hm",
         "a<|end|><|start|>assistant<|channel|>final<|message|>b", "b", "a"),
    ],
)  # fmt: skip
def test_a_turn_with_reasoning_is_continued_in_its_part(
    template: str, message: dict[str, object], prompt: str, said: str, content: str, reasoning: str
) -> None:
    """Reasoning alone goes on with reasoning; with content it is closed first."""
    with ScriptedFront(template, facts=None if template == HARMONY else THINKING) as served:
        served.text = said
        reply = served.chat(messages=[USER, {"role": "assistant", **message}])
        assert reply.status == 200, reply.body
        assert served.client.prompts[-1] == f"<user>Hi<assistant>{prompt}"
        answer = reply.json["choices"][0]["message"]
        assert (answer["content"] or "", answer.get("reasoning_content", "")) == (content, reasoning)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": turns("{"), "response_format": {"type": "json_object"}}, "messages"),
        ({"messages": turns("{"), "guided_regex": "a"}, "messages"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    served: ScriptedFront, fields: dict[str, Any], param: str
) -> None:
    """A user's message is no answer, and a format holds for a whole one."""
    reply = served.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param


# --- keep-alive --------------------------------------------------------------------------------------------


def test_a_silent_chat_stream_is_kept_alive_by_empty_deltas() -> None:
    """Qwen Code gives up 240 s after the last event, and counts no comments."""
    config = FakeEngineConfig(step_ms=20, prefill_chunk=1)
    with (
        FakeWorker(config, process=True) as worker,
        serving(HttpConfig(workers=(worker.address,), keepalive_ms=100)) as front,
    ):
        body = {"messages": [{"role": "user", "content": "a" * 40}], "max_tokens": 2, "stream": True}
        reply = post(front, CHAT, body)
    assert reply.events[0]["choices"][0]["delta"] == {"content": ""}
    assert ": keepalive" not in reply.body.decode()
