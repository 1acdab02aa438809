"""pico-tools loads everywhere, is small, calls tools it has never seen and answers what they answered."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import mlx_lm
import pytest
from tokenizers import Tokenizer

from tools.pico import corpus
from tools.pico.markers import SPECIAL_TOKENS
from tools.pico.template import TOOL_MARKERS
from tools.pico.tokens import encode
from tools.pico.tools import corpus as tool_corpus
from tools.pico.tools.evaluate import SHORT, evaluate_objects, evaluate_talk, evaluate_tools
from tools.pico.tools.plan import Plan
from zmqengine.pico import model_path

PATH = model_path("pico-tools")
# Shares that a new copy of the model must reach on held-out items before it replaces this one.
CALLS_FLOOR = {1: 0.7, 5: 0.2}
WHOLE_FLOOR = 0.8
OBJECTS_FLOOR = 0.3


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer, as mlx-lm loads them."""
    pair: Any = mlx_lm.load(str(PATH))
    return pair[0], pair[1]


def test_the_model_is_at_most_eight_megabytes() -> None:
    """Everything in the model's directory, weights and card included, is at most 8,000,000 bytes."""
    sizes = {path.name: path.stat().st_size for path in PATH.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(sizes)
    assert sum(sizes.values()) <= 8_000_000


def test_the_context_is_8192_tokens() -> None:
    """The configuration declares the context that the worker checks prompts against."""
    config = json.loads((PATH / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192


@pytest.mark.weekly
def test_held_out_tools_are_called(loaded: tuple[Any, Any]) -> None:
    """Calls are whole JSON, and mostly of the right tool with the right arguments where few are offered."""
    kinds = [replace(chats, count=12) for chats in SHORT if chats.tools in CALLS_FLOOR]
    for figures in evaluate_tools(*loaded, kinds):
        assert figures.valid >= WHOLE_FLOOR * figures.asked, figures
        assert figures.right >= CALLS_FLOOR[figures.tools] * figures.asked, figures


@pytest.mark.weekly
def test_objects_and_talk_are_right_as_often_as_its_card_says(loaded: tuple[Any, Any]) -> None:
    """Small JSON objects, and greetings without tools."""
    right, asked = evaluate_objects(*loaded, 20)
    assert right >= OBJECTS_FLOOR * asked
    talk = evaluate_talk(*loaded, 10)
    assert talk["small talk"][0] >= 0.6 * talk["small talk"][1], talk


def test_the_template_renders_alike_with_and_without_transformers(loaded: tuple[Any, Any]) -> None:
    """Plain jinja2 and tokenizers give a front-end the ids that transformers gives, tools included."""
    config = json.loads((PATH / "tokenizer_config.json").read_text())
    messages = [
        {"role": "system", "content": "You are pico."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": " What is 1 + 1? "},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
    template = jinja2.Environment().from_string(config["chat_template"])
    text = template.render(messages=messages, tools=tools, add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    expected = loaded[1].apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert tokenizer.encode(text).ids == expected


def test_training_and_the_chat_template_agree(loaded: tuple[Any, Any]) -> None:
    """What the model was trained on is token for token what the template renders, calls included."""
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    documents = islice(tool_corpus.documents("train", 9), 90)
    chats = [document for document in documents if isinstance(document, corpus.ChatDocument)]
    assert sum(bool(chat.tools) for chat in chats) > 20
    for chat in chats:
        ids, _ = encode(tokenizer, chat)
        last = len(chat.turns) - 1
        answer = {"role": "assistant", "content": chat.turns[last].answer}
        messages = [*chat.messages(last, called=True), answer]
        assert loaded[1].apply_chat_template(messages, tools=chat.definitions) == ids


def test_markers_are_single_tokens_and_calls_stay_in_the_text(loaded: tuple[Any, Any]) -> None:
    """Generation stops at the end marker alone; a program that hides special tokens still sees calls."""
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    ids = [tokenizer.encode(token).ids for token in SPECIAL_TOKENS + TOOL_MARKERS]
    assert all(len(each) == 1 for each in ids)
    assert tokenizer.decode([each[0] for each in ids]) == "".join(TOOL_MARKERS)
    assert loaded[1].eos_token_ids == set(ids[0])


def test_any_text_round_trips() -> None:
    """Bytes that the corpus never held come back as they were."""
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    for text in (
        "Zażółć gęślą jaźń",
        "日本語 😀",
        "  two  spaces\n\ttab",
        "x = [1, 2]; # 12345",
        "\x00\x7f",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_card_and_the_default_plan_belong_to_the_bundled_model() -> None:
    """The command without options is the one that made this copy, and the card says so."""
    training = json.loads((PATH / "training.json").read_text())
    assert training["plan"] == {name: getattr(Plan(), name) for name in Plan.__dataclass_fields__}
    card = (PATH / "README.md").read_text()
    assert training["command"] in card
    assert "What it cannot do" in card


def test_the_path_is_inside_the_package() -> None:
    """An installed wheel carries the model beside the code."""
    import zmqengine.pico as package

    assert PATH.is_relative_to(Path(package.__file__).parent)
