"""The options of the chat, and the choice of a model."""

from __future__ import annotations

import json
from typing import cast

import pytest

from tests.http.front import serving
from tests.http.page.browsers import Browser, until
from tests.http.page.steps import Script, answered, back, fill, push, say, texts, visit
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.protocol.messages import ThinkingMax
from zmqengine.sampling_params import Sampling
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

pytestmark = pytest.mark.process


def test_every_sampling_parameter_has_a_field(scripted: Browser, script: Script) -> None:
    """With its meaning; what is filled in is sent, kept over a reload, and dropped by Reset."""
    names = Sampling.__struct_fields__
    assert scripted.js("return [...document.querySelectorAll('#sampling input')].map((e) => e.id)") == list(
        names
    )
    assert all(
        scripted.js(
            "return [...document.querySelectorAll('#sampling input[type=number]')].map((e) => e.parentNode.title)"
        )
    )
    values = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {65: -50.0}, "min_tokens": 1,
    }  # fmt: skip
    assert set(values) == set(names)
    fill(scripted, **{name: json.dumps(value) for name, value in values.items()})
    assert scripted.js("return document.getElementById('options-open').dataset.count") == str(len(names))
    scripted.refresh()
    back(scripted)
    script.text = "one ### two"
    say(scripted, "Hello", seed=7, **{"stop-texts": "End\n###"})
    answered(scripted, 1)
    sent = script.client.options[-1]
    assert {name: sent[name] for name in names} == values
    assert sent["seed"] == 7
    assert texts(scripted, ".answer") == ["one"]
    push(scripted, "Reset")
    say(scripted, "Hello")
    answered(scripted, 2)
    assert script.client.options[-1]["temperature"] == 0.6
    assert scripted.js("return document.getElementById('options-open').dataset.count") == ""


def test_an_answer_takes_the_form_of_a_schema(scripted: Browser, script: Script) -> None:
    """A schema that is no JSON is told while it is written, and nothing is asked with it."""
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    fill(scripted, format="json_schema", schema="{")
    assert "JSON" in texts(scripted, "#schema-error")[0]
    asked = len(script.client.prompts)
    say(scripted, "How old?")
    until(scripted, "return document.querySelectorAll('.turn .error').length === 1", "the refusal")
    assert texts(scripted, ".turn .error span")[0].startswith("Schema: ")
    assert len(script.client.prompts) == asked
    fill(scripted, schema=json.dumps(schema))
    assert texts(scripted, "#schema-error") == [""]
    scripted.js(
        "const real = fetch;"
        "window.fetch = (path, options = {}) => {"
        "  window.sent = options.body || window.sent; return real(path, options); }"
    )
    push(scripted, "Try again")
    # The scripted worker cannot hold its model to a schema: it says so.
    until(
        scripted,
        "return /cannot hold/.test(document.querySelector('.turn .error').textContent)",
        "the answer",
    )
    assert json.loads(scripted.js("return window.sent"))["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "answer", "schema": schema},
    }  # fmt: skip


def test_the_effort_of_thinking_is_offered_where_a_model_thinks(
    window: Browser, scripted: Browser, script: Script
) -> None:
    """And sent with the question."""
    assert scripted.js("return document.getElementById('effort').checkVisibility()")
    say(scripted, "Hello", reasoning_effort="high", thinking_max=20)
    answered(scripted, 1)
    assert cast(ThinkingMax, script.client.options[-1]["thinking_max"]).tokens == 20
    assert script.client.prompts[-1] == "<user>Hello<high><assistant>"
    with FakeWorker() as worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        visit(window, front.url + "/")
        assert not window.js("return document.getElementById('effort').checkVisibility()")
        window.get("about:blank")


def test_only_models_that_chat_are_offered(window: Browser) -> None:
    """Not one that makes embeddings, though it comes first by its name."""
    embeds = FakeEngineConfig(name="a-embedder", generates=False, dimensions=8)
    with FakeWorker(embeds) as first, FakeWorker(FakeEngineConfig(name="talker", instant=True)) as second:
        config = HttpConfig(workers=(first.address, second.address), probe_ms=200)
        with serving(config) as front:
            window.get(front.url + "/")
            until(window, "return document.body.dataset.ready === '2'", "both models")
            assert texts(window, "#model-list strong") == ["talker"]
            say(window, "Hello", max_tokens=4)
            answered(window, 1)
            assert texts(window, ".turn .error") == []
            assert texts(window, ".turn .by") == ["talker"]
            window.get("about:blank")


def test_a_theme_can_be_chosen(scripted: Browser) -> None:
    """Against that of the system, and for the page of the workers too."""
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = scripted.js(ground)
    fill(scripted, theme="dark")
    dark = scripted.js(ground)
    assert dark != light
    scripted.refresh()
    back(scripted)
    assert scripted.js(ground) == dark
    fill(scripted, theme="")
    assert scripted.js(ground) == light
