"""Chat templates as models are published with."""

from __future__ import annotations

from typing import Any

import pytest

from zmqengine.errors import BadRequest
from zmqengine_client.text.chat_template import ChatTemplate

transformers_templates = pytest.importorskip("transformers.utils.chat_template_utils")

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
    {%- if message.content is string %}
        {%- set content = message.content.strip() %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
{{ ns.last }}"""

INST = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
    {% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

MESSAGES = [
    {"role": "user", "content": " hi <b> & 'you' "},
    {"role": "assistant", "content": "hello é"},
    {"role": "user", "content": "bye"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": '<é> & "x"', "parameters": {}}}]


@pytest.mark.parametrize("template", [CHATML, INST])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"tools": TOOLS},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
    ],
)
def test_a_template_renders_as_transformers_renders_it(template: str, variables: dict[str, Any]) -> None:
    """White space, tojson, namespace, loop controls and generation blocks: the model was trained on exactly this."""
    variables = {
        "tools": None,
        "add_generation_prompt": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
    } | variables
    rest = {
        name: value for name, value in variables.items() if name not in ("tools", "add_generation_prompt")
    }
    rendered = transformers_templates.render_jinja_template(
        conversations=[MESSAGES],
        tools=variables["tools"],
        chat_template=template,
        add_generation_prompt=variables["add_generation_prompt"],
        **rest,
    )
    (expected,) = rendered[0] if isinstance(rendered, tuple) else [rendered]
    assert ChatTemplate(template).render(MESSAGES, {"documents": None, **variables}) == expected


def test_what_a_template_objects_to_is_a_bad_request() -> None:
    """raise_exception is the template's way to refuse."""
    with pytest.raises(BadRequest, match="roles must alternate"):
        ChatTemplate(INST).render([{"role": "assistant", "content": "x"}], {"bos_token": "", "eos_token": ""})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ messages | nothing }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_is_refused_and_reaches_nothing(template: str) -> None:
    """A template comes from the internet: it runs in a sandbox, and its failures are typed."""
    with pytest.raises(BadRequest):
        ChatTemplate(template).render(MESSAGES, {})


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    """Not a jinja2 exception that nobody expects."""
    with pytest.raises(BadRequest, match="broken"):
        ChatTemplate("{% if %}")


def test_a_template_sees_plain_data_only() -> None:
    """An object of the caller's has methods that nobody meant to give away."""
    with pytest.raises(BadRequest, match="plain data"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": open}], {})
    with pytest.raises(BadRequest, match="mappings"):
        ChatTemplate("{{ messages }}").render(["hi"], {})  # type: ignore[list-item]


def test_the_date_can_be_asked_for() -> None:
    """strftime_now is part of the dialect."""
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render([], {})) == 4


# Idefics3's and SmolVLM's: a text has neither a first part nor parts to write.
PARTS = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


@pytest.mark.parametrize("source", [CHATML, INST, PARTS])
def test_a_text_and_its_parts_are_the_same(source: str) -> None:
    """A template that writes texts would write the parts as Python does, or none; another one would write no text."""
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " there"}]
    prompts = [
        ChatTemplate(source).render([{"role": "user", "content": content}], {"bos_token": "<s>"})
        for content in ("hello there", parts, tuple(parts))
    ]
    assert "hello there" in prompts[0]
    assert prompts[0] == prompts[1] == prompts[2]


def test_what_is_no_text_is_given_as_it_is() -> None:
    """An image beside a text, a content that is missing, and parts of which a template may know more."""
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hello"}]}
    assert "User:<image>hello<end_of_utterance>" in ChatTemplate(PARTS).render([image], {})
    shown = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert shown.render([{"role": "user", "content": None}], {}) == "None"
    assert "'audio'" in shown.render([{"role": "user", "content": [{"type": "audio"}]}], {})
