"""Measure a model on held-out stories and chats: `python -m tools.pico.evaluate DIR [--card]`."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import batch_generate
from mlx_lm.sample_utils import make_sampler
from tokenizers import Tokenizer

from tools.pico import corpus, words
from tools.pico.card import write_card
from tools.pico.chat import Turn
from tools.pico.corpus import ChatDocument, StoryDocument
from tools.pico.directory import CONTEXT_TOKENS
from tools.pico.draw import Draw
from tools.pico.loss import mean_loss

TOKENS_MAX = 300
_EVALUATION_SEED = 2
_ROWS = 16


@dataclass(frozen=True)
class Figures:
    """What was measured; shares are from 0 to 1, `answers_right` maps a task to (right, asked).

    `sentences_in_grammar` is the share of generated sentences that the corpus's grammar could have written.
    """

    tokens_max: int
    held_out_loss: float
    story_prompts: int
    stories_ended_greedy: float
    stories_ended_sampled: float
    story_tokens_mean: float
    sentences_in_grammar_greedy: float
    sentences_in_grammar_sampled: float
    chat_prompts: int
    chats_ended_greedy: float
    chats_ended_sampled: float
    answers_right: dict[str, tuple[int, int]]
    samples: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reply:
    """Generated text, the number of its tokens, and whether the model ended it."""

    text: str
    tokens: int
    ended: bool


def evaluate(directory: Path, story_count: int = 64, chat_count: int = 80) -> Figures:
    """Measure the model in `directory` on held-out documents: the same ones each time."""
    loaded: Any = mlx_lm.load(str(directory))
    model, tokenizer = loaded[0], loaded[1]
    documents = list(islice(corpus.documents("held_out", _EVALUATION_SEED), 8 * (story_count + chat_count)))
    stories = [document for document in documents if isinstance(document, StoryDocument)][:story_count]
    chats = [document for document in documents if isinstance(document, ChatDocument)][:chat_count]

    openings = _openings([story.text for story in stories])
    story_prompts = [tokenizer.encode(opening) for opening in openings]
    greedy_stories = _replies(model, tokenizer, story_prompts, temperature=0.0)
    sampled_stories = _replies(model, tokenizer, story_prompts, temperature=0.7)

    asked = [(chat, index) for chat in chats for index in range(len(chat.turns))]
    chat_prompts = [
        tokenizer.apply_chat_template(chat.messages(index), add_generation_prompt=True)
        for chat, index in asked
    ]
    greedy_chats = _replies(model, tokenizer, chat_prompts, temperature=0.0)
    sampled_chats = _replies(model, tokenizer, chat_prompts, temperature=0.7)
    turns = [chat.turns[index] for chat, index in asked]
    return Figures(
        tokens_max=TOKENS_MAX,
        held_out_loss=mean_loss(
            model,
            Tokenizer.from_file(str(directory / "tokenizer.json")),
            [*stories, *chats],
            CONTEXT_TOKENS,
        ),
        story_prompts=len(openings),
        stories_ended_greedy=_ended(greedy_stories),
        stories_ended_sampled=_ended(sampled_stories),
        story_tokens_mean=sum(reply.tokens for reply in greedy_stories) / len(greedy_stories),
        sentences_in_grammar_greedy=_in_grammar(openings, greedy_stories),
        sentences_in_grammar_sampled=_in_grammar(openings, sampled_stories),
        chat_prompts=len(turns),
        chats_ended_greedy=_ended(greedy_chats),
        chats_ended_sampled=_ended(sampled_chats),
        answers_right=_answers_right(turns, greedy_chats),
        samples=_samples(model, tokenizer),
    )


def is_right(turn: Turn, reply: str) -> bool:
    """Whether a reply answers a turn: a question by its fact, a story by its hero, all else word for word."""
    return turn.fact in reply if turn.task in ("question", "story") else reply.strip() == turn.answer


def _openings(texts: Sequence[str]) -> list[str]:
    """The first 4 to 12 words of each text."""
    draw = Draw(_EVALUATION_SEED, "held_out")
    return [" ".join(text.split(" ")[: draw.number(4, 12)]) for text in texts]


def _replies(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float) -> list[Reply]:
    mx.random.seed(_EVALUATION_SEED)
    replies: list[Reply] = []
    for first in range(0, len(prompts), _ROWS):
        response: Any = batch_generate(
            model,
            tokenizer,
            prompts[first : first + _ROWS],
            max_tokens=TOKENS_MAX,
            return_token_ids=True,
            sampler=make_sampler(temp=temperature),
        )
        replies += [
            Reply(text, len(ids), len(ids) < TOKENS_MAX)
            for text, ids in zip(response.texts, response.token_ids, strict=True)
        ]
    return replies


def _ended(replies: list[Reply]) -> float:
    return sum(reply.ended for reply in replies) / len(replies)


def _answers_right(turns: list[Turn], replies: list[Reply]) -> dict[str, tuple[int, int]]:
    asked = Counter(turn.task for turn in turns)
    right = Counter(
        turn.task for turn, reply in zip(turns, replies, strict=True) if is_right(turn, reply.text)
    )
    return {task: (right[task], asked[task]) for task in sorted(asked)}


@cache
def _training_shapes() -> frozenset[str]:
    """Shapes of the sentences of training stories, with names and things left open."""
    return frozenset(
        shape
        for document in corpus.sample("train", _EVALUATION_SEED, 20_000)
        if isinstance(document, StoryDocument)
        for shape in _shapes(document.text)
    )


def _in_grammar(openings: list[str], replies: list[Reply]) -> float:
    """The share of sentences whose shape some training story has too."""
    known = _training_shapes()
    shapes = [
        shape
        for opening, reply in zip(openings, replies, strict=True)
        for shape in _shapes(opening + reply.text)
    ]
    return sum(shape in known for shape in shapes) / len(shapes)


_CLASSES: dict[str, tuple[Sequence[str], ...]] = {
    "NAME": (words.NAMES,),
    "WORD": (words.ANIMALS, words.COLORS, words.TOYS, words.SIZES, ["boy", "girl"]),
}
_CLASS_OF = {word: label for label, groups in _CLASSES.items() for group in groups for word in group}


def _shapes(text: str) -> list[str]:
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    return [
        re.sub(r"[A-Za-z]+", lambda match: _CLASS_OF.get(match[0], match[0]), sentence)
        for sentence in sentences
    ]


_STORY_SAMPLES = ("Once upon a time", "One day, Mia", "The little fox")
_CHAT_SAMPLES = (
    "Hello, my name is Rosa.",
    "What is 7 + 5?",
    "Count from 3 to 9.",
    "Repeat after me: green boat moon",
)


def _samples(model: Any, tokenizer: Any) -> tuple[tuple[str, str], ...]:
    prompts = [tokenizer.encode(prompt) for prompt in _STORY_SAMPLES]
    prompts += [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in _CHAT_SAMPLES
    ]
    replies = _replies(model, tokenizer, prompts, temperature=0.0)
    names = [*(f"{prompt} ..." for prompt in _STORY_SAMPLES), *(f"user: {text}" for text in _CHAT_SAMPLES)]
    return tuple(zip(names, (reply.text.strip() for reply in replies), strict=True))


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--stories", "story_count", default=64, show_default=True, help="Held-out stories to go on from."
)
@click.option("--chats", "chat_count", default=80, show_default=True, help="Held-out chats to answer.")
@click.option("--card", is_flag=True, help="Also write the figures into DIRECTORY/README.md.")
def main(directory: Path, story_count: int, chat_count: int, card: bool) -> None:
    """Print a model's figures as JSON."""
    figures = asdict(evaluate(directory, story_count, chat_count))
    print(json.dumps(figures, indent=2))
    if card:
        write_card(directory, figures)


if __name__ == "__main__":
    main()
