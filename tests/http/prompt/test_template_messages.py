"""Chat templates differ in what they have places for: nothing of a chat gets lost, and nothing is refused for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zmqengine.pico import model_path
from zmqengine.protocol.messages import Limits, ModelCard, TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http.prompt.prompts import encode_chat
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.workers.worker import Model

TOOL: dict[str, object] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
NEXT = "{{ '\\n' }}{% endfor %}"


def call(id_: str, **arguments: object) -> dict[str, object]:
    return {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}


def assistant(*calls: dict[str, object], content: str = "", **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def result(id_: str, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def model_of(template: str | None, facts: dict[str, str | bool | int], *, generates: bool = True) -> Model:
    """A model with this chat template."""
    bundle = TokenizerBundle(
        call=0, hash="t", tokenizer_json=(model_path() / "tokenizer.json").read_bytes(), eos_token_ids=[0],
        chat_template=template, facts=facts,
    )  # fmt: skip
    card = ModelCard("m", 1000, 10**6, [0], "t", 0, generates)
    return Model(card, Limits(2**24, 10**6, 10**6, 64, 64, 64), Tokenizer(bundle))


def rendered(template: str, *messages: dict[str, object], tools: Any = (), **facts: str | bool | int) -> str:
    """The text of the prompt."""
    model = model_of(template, facts)
    prompt = encode_chat(model, list(messages), tools, {})
    return model.tokenizer.decode(prompt.tokens, skip_special_tokens=False)


def test_without_a_template_a_model_of_text_is_sent_to_completions_and_no_other() -> None:
    """A model of embeddings would refuse them too."""
    with pytest.raises(ApiError, match="use /v1/completions"):
        encode_chat(model_of(None, {}), [user("Go.")], (), {})
    with pytest.raises(ApiError, match="no chat template; it makes embeddings or scores"):
        encode_chat(model_of(None, {}, generates=False), [user("Go.")], (), {})


def test_calls_that_a_template_has_no_place_for_are_in_the_content() -> None:
    """LFM2 and Granite 3 show results of tools, but not what was called: the model would not know why."""
    template = "{{ tools }} <|tool_call_start|>\n" + EACH + NEXT
    messages = [user("Go."), assistant(call("1", a=1), content="So: "), result("1", "2")]
    text = rendered(template, *messages, tools=[TOOL])
    assert "<assistant>So: <|tool_call_start|>[add(a=1)]<|tool_call_end|>\n<tool>2" in text
    text = rendered(template.replace("<|tool_call_start|>", "<|tool_call|>"), *messages, tools=[TOOL])
    assert '<assistant>So: <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]\n<tool>2' in text


ONE = EACH + "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments }}{% endif %}" + NEXT
REFUSES = (
    "{% for m in messages %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
)


@pytest.mark.parametrize("template", [ONE, REFUSES + ONE.removeprefix("{% for m in messages %}")])
def test_several_calls_are_told_one_after_another_where_one_has_a_place(template: str) -> None:
    """Llama 3 refuses two calls at once, gpt-oss leaves out the second."""
    two = assistant(call("1", a=1), call("2", a=2), content="Both.")
    text = rendered(template, two, result("1", "one"), result("2", "two"), user("And?"), tools=[])
    assert text.split("\n")[:5] == [
        "<assistant>Both.{'a': 1}", "<tool>one", "<assistant>{'a': 2}", "<tool>two", "<user>And?",
    ]  # fmt: skip
    # A result that did not come takes no call with it.
    assert "{'a': 2}" in rendered(template, two, result("1", "one"), user("And?"))
    each = (
        EACH
        + "{{ m.tool_calls[0].id }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
        + NEXT
    )
    assert "Both.1{'a': 1}{'a': 2}" in rendered(each, two)


def test_arguments_are_json_for_templates_that_put_texts_together() -> None:
    """DeepSeek's own template for R1 takes texts, most others objects."""
    template = (
        EACH
        + "{% for c in m.tool_calls or [] %}{{ c.function.name + ':' + c.function.arguments }}{% endfor %}"
    )
    assert 'add:{"a": "ż"}' in rendered(template + NEXT, assistant(call("1", a="ż")))


@pytest.mark.parametrize("word", ["reasoning_content", "reasoning", "thinking", "tool_plan"])
def test_reasoning_has_the_templates_own_word(word: str) -> None:
    """Clients send it in one or two, and every family of templates reads another."""
    template = EACH + f"{{% if m.{word} %}}[{{{{ m.{word} }}}}]{{% endif %}}" + NEXT
    assert "<assistant>[hm]" in rendered(template, assistant(call("1"), reasoning_content="hm"))


def test_reasoning_that_a_template_refuses_beside_content_is_left_out() -> None:
    """gpt-oss takes one of them with a call."""
    template = (
        EACH
        + "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}{{ m.thinking }}"
        + NEXT
    )
    both = assistant(call("1"), content="Let me see.", reasoning_content="hm")
    assert "<assistant>Let me see." in rendered(template, both)


def test_a_system_that_a_template_refuses_is_what_the_user_says_first() -> None:
    """Gemma up to 2 has no such role, and agents begin with one."""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH + NEXT
    )
    system: dict[str, object] = {"role": "system", "content": "Be brief."}
    assert rendered(template, system, user("Hello"), assistant(content="Hi")) == (
        "<user>Be brief.\n\nHello\n<assistant>Hi\n"
    )
    assert rendered(template, system) == "<user>Be brief.\n"


def test_tools_are_where_the_template_looks_for_them() -> None:
    """Phi-4-mini reads them off the system message, SmolLM3 by another name; without a place they are refused."""
    own = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.tools }}" + NEXT
    written = json.dumps([TOOL["function"]])
    assert f"<system>{written}\n<user>Hello" in rendered(own, user("Hello"), tools=[TOOL])
    system: dict[str, object] = {"role": "system", "content": "Be brief."}
    assert f"<system>Be brief.{written}\n" in rendered(own, system, user("Hello"), tools=[TOOL])
    assert "'name': 'add'" in rendered("{{ xml_tools }}" + EACH + NEXT, user("Hello"), tools=[TOOL])
    with pytest.raises(ApiError, match="takes none"):
        rendered("You may use tools." + EACH + NEXT, user("Hello"), tools=[TOOL])


def test_a_template_for_chats_with_tools_is_used_for_them() -> None:
    """Hermes 3 and Command R come with a template for each."""
    other = {"chat_template_tool_use": "<tool_call> {{ tools | length }} of " + EACH + NEXT}
    assert rendered(EACH + NEXT, user("Hello"), tools=[TOOL], **other).startswith(
        "<tool_call> 1 of <user>Hello"
    )
    assert rendered(EACH + NEXT, user("Hello"), **other) == "<user>Hello\n"
