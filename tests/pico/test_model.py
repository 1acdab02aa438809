"""The bundled model loads everywhere, is small, writes stories, answers chats and ends by itself."""

import json
from pathlib import Path
from typing import Any

import jinja2
import mlx_lm
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.sample_utils import make_sampler
from tokenizers import Tokenizer

from tools.pico import corpus
from tools.pico.evaluate import evaluate
from tools.pico.markers import SPECIAL_TOKENS
from tools.pico.tokens import encode
from tools.pico.train import Plan
from zmqengine.pico import model_path

TOKENS_MAX = 300
# Shares that a new copy of the model must reach on held-out items before it replaces this one.
FLOORS = {
    "arithmetic": 0.9,
    "question": 0.75,
    "repeating": 0.7,
    "introduction": 0.9,
    "small talk": 0.9,
    "story": 0.3,
}


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The bundled model and its tokenizer, as mlx-lm loads them."""
    pair: Any = mlx_lm.load(str(model_path()))
    return pair[0], pair[1]


def _reply(loaded: tuple[Any, Any], messages: list[dict[str, str]]) -> str:
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS_MAX)


def _ask(loaded: tuple[Any, Any], text: str) -> str:
    return _reply(loaded, [{"role": "user", "content": text}])


def test_the_model_is_at_most_five_megabytes() -> None:
    """Everything in the model's directory, weights and card included, is at most 5,000,000 bytes."""
    sizes = {path.name: path.stat().st_size for path in model_path().rglob("*") if path.is_file()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= set(sizes)
    assert sum(sizes.values()) <= 5_000_000


def test_the_context_is_at_least_2048_tokens() -> None:
    """The configuration declares the context that the worker checks prompts against."""
    config = json.loads((model_path() / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_stories_end_by_themselves(loaded: tuple[Any, Any], temperature: float) -> None:
    """Raw openings become stories of more than 40 tokens that stop before 300, with a full sentence."""
    model, tokenizer = loaded
    openings = [
        "Once upon a time",
        "One day, a little fox",
        "There was once",
        "Long ago, a young girl named Mia",
    ]
    response: Any = batch_generate(
        model,
        tokenizer,
        [tokenizer.encode(opening) for opening in openings],
        max_tokens=TOKENS_MAX,
        return_token_ids=True,
        sampler=make_sampler(temp=temperature),
    )
    for text, ids in zip(response.texts, response.token_ids, strict=True):
        assert 40 < len(ids) < TOKENS_MAX, text
        assert text.rstrip()[-1] in '.!"', text


def test_greedy_stories_do_not_depend_on_the_batch(loaded: tuple[Any, Any]) -> None:
    """Weights are float32: a prompt alone gives the tokens that it gives among others."""
    model, tokenizer = loaded
    prompts = [
        tokenizer.encode(text)
        for text in ("Once upon a time", "In a village lived", "Tom was a", "Long ago,")
    ]
    together: Any = batch_generate(model, tokenizer, prompts, max_tokens=TOKENS_MAX)
    alone = [mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS_MAX) for prompt in prompts]
    assert [text.strip() for text in together.texts] == [text.strip() for text in alone]


@pytest.mark.weekly
@pytest.mark.timeout(600)
def test_held_out_items_are_answered_and_ended() -> None:
    """On documents it never saw, the model ends by itself and is right nearly as often as its card says."""
    figures = evaluate(model_path(), story_count=10, chat_count=40)
    assert figures.stories_ended_greedy >= 0.9
    assert figures.chats_ended_greedy >= 0.95
    for task, floor in FLOORS.items():
        right, asked = figures.answers_right[task]
        assert right >= floor * asked, (task, right, asked)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello!", "Hello! How can I help you?"),
        ("What is your name?", "My name is pico."),
        ("My name is Mia.", "Hello, Mia! It is nice to meet you."),
        ("Repeat after me: blue boat moon", "blue boat moon"),
        ("What is 3 + 4?", "3 + 4 = 7."),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
    ],
)
def test_chats_are_answered_right(loaded: tuple[Any, Any], question: str, answer: str) -> None:
    """Through the chat template, simple requests get their answer and nothing after it."""
    assert _ask(loaded, question) == answer


def test_a_question_about_the_story_just_told_is_answered(loaded: tuple[Any, Any]) -> None:
    """The model tells a story in one turn and names its hero in the next."""
    messages = [{"role": "user", "content": "Tell me a story about a fox named Mia."}]
    story = _reply(loaded, messages)
    assert "Mia" in story
    assert "fox" in story
    messages += [
        {"role": "assistant", "content": story},
        {"role": "user", "content": "Who is the story about?"},
    ]
    assert _reply(loaded, messages) == "The story is about Mia."


def test_a_name_is_recalled(loaded: tuple[Any, Any]) -> None:
    """Earlier messages count: the user's name is known two turns later."""
    messages = [{"role": "user", "content": "My name is Rosa."}]
    greeting = _reply(loaded, messages)
    assert "Rosa" in greeting
    messages += [
        {"role": "assistant", "content": greeting},
        {"role": "user", "content": "What is my name?"},
    ]
    assert _reply(loaded, messages) == "Your name is Rosa."


def test_the_system_prompt_names_the_assistant(loaded: tuple[Any, Any]) -> None:
    """Asked at once, the model goes by the name it was given; later in a chat it often forgets, as its card says."""
    messages = [
        {"role": "system", "content": "You are Felix, a helpful assistant."},
        {"role": "user", "content": "What is your name?"},
    ]
    assert _reply(loaded, messages) == "My name is Felix."


def test_any_text_round_trips(loaded: tuple[Any, Any]) -> None:
    """Bytes that the corpus never held come back as they were."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    for text in (
        "Zażółć gęślą jaźń",
        "日本語 😀",
        "  two  spaces\n\ttab",
        "x = [1, 2]; # 12345",
        "\x00\x7f",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
        assert loaded[1].decode(loaded[1].encode(text)) == text


def test_the_chat_template_renders_alike_with_and_without_transformers(loaded: tuple[Any, Any]) -> None:
    """Plain jinja2 and tokenizers give a front-end the ids that transformers gives, tools included."""
    config = json.loads((model_path() / "tokenizer_config.json").read_text())
    messages = [
        {"role": "system", "content": "You are pico."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": " What is 1 + 1? "},
    ]
    template = jinja2.Environment().from_string(config["chat_template"])
    text = template.render(messages=messages, add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    assert tokenizer.encode(text).ids == loaded[1].apply_chat_template(messages, add_generation_prompt=True)
    assert text.endswith("What is 1 + 1?<|end|><|assistant|>")


def test_training_and_the_chat_template_agree(loaded: tuple[Any, Any]) -> None:
    """What the model was trained on is token for token what the template renders."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    chats = [
        document for document in corpus.sample("train", 9, 60) if isinstance(document, corpus.ChatDocument)
    ]
    assert len(chats) > 20
    for chat in chats:
        ids, _ = encode(tokenizer, chat)
        last = len(chat.turns) - 1
        messages = [*chat.messages(last), {"role": "assistant", "content": chat.turns[last].answer}]
        assert loaded[1].apply_chat_template(messages) == ids


def test_special_tokens_are_single_and_the_end_is_the_stop_token(loaded: tuple[Any, Any]) -> None:
    """Each marker is one token, and generation stops at the end marker alone."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    ids = [tokenizer.encode(token).ids for token in SPECIAL_TOKENS]
    assert all(len(each) == 1 for each in ids)
    assert loaded[1].eos_token_ids == set(ids[0])


@pytest.mark.slow
def test_a_prompt_of_the_whole_context_does_not_break_the_model(loaded: tuple[Any, Any]) -> None:
    """2,000 tokens of prompt, more than training held, still lead to plain text."""
    model, tokenizer = loaded
    prompt = tokenizer.encode("Once upon a time there was a little fox named Mia. " * 200)[:2000]
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=40)
    assert text.isascii()


def test_the_card_and_the_default_plan_belong_to_the_bundled_model() -> None:
    """The command without options is the one that made this copy, and the card says so."""
    training = json.loads((model_path() / "training.json").read_text())
    assert training["plan"] == {**training["plan"], **_plan_fields(Plan())}
    card = (model_path() / "README.md").read_text()
    assert training["command"] in card
    assert "Held-out loss" in card


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_the_path_is_inside_the_package() -> None:
    """An installed wheel carries the model beside the code."""
    import zmqengine.pico as package

    assert model_path().parent == Path(package.__file__).parent
