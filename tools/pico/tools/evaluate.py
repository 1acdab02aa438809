"""Measure tool calls on held-out tools and asks: `python -m tools.pico.tools.evaluate DIR [--card]`."""

import copy
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from tools.pico import chat
from tools.pico.chat import Turn
from tools.pico.corpus import ChatDocument
from tools.pico.draw import Draw
from tools.pico.tools import corpus as tool_corpus
from tools.pico.tools.card import write_card
from tools.pico.tools.chat import NO_TOOL, call_turn, offers, unmet_turn
from tools.pico.tools.objects import object_turn

_SEED = 4
_REPLY_TOKENS_MAX = 120
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolFigures:
    """Counts out of `asked` asks for which one of `tools` tools fits, and of `unmet` ones for which none does.

    `valid` are calls whose JSON is whole and complete, `named` those of the right tool, `right` those with the right
    arguments too, `told` the answers of tools that were told as they should be. The ask follows on a beginning of
    some `tokens` tokens that lies before the tools (`where` is "system") or between tools and ask ("chat").
    """

    where: str
    tokens: int
    tools: int
    asked: int
    valid: int
    named: int
    right: int
    told: int
    unmet: int
    left_alone: int


@dataclass(frozen=True)
class Figures:
    """What was measured; `objects_right` is (right, asked), as is each of `talk_right`."""

    tools: tuple[ToolFigures, ...]
    objects_right: tuple[int, int]
    talk_right: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Chats:
    """`count` chats of a kind, each with its own tools and `asks` asks that these tools are for."""

    where: str
    tokens: int
    tools: int
    count: int
    asks: int


SHORT = tuple(Chats("system", 0, tools, 20, 2) for tools in (1, 2, 5, 20))
LONG = tuple(Chats(where, tokens, 2, 1, 12) for where in ("system", "chat") for tokens in (2000, 4000, 6000))


def evaluate(directory: Path, long: bool = True) -> Figures:
    """Measure the model in `directory`: on the same held-out documents each time."""
    loaded: Any = mlx_lm.load(str(directory))
    model, tokenizer = loaded[0], loaded[1]
    return Figures(
        tools=evaluate_tools(model, tokenizer, SHORT + LONG if long else SHORT),
        objects_right=evaluate_objects(model, tokenizer, 60),
        talk_right=evaluate_talk(model, tokenizer, 15),
    )


def evaluate_tools(
    model: Any, tokenizer: Any, kinds: Sequence[Chats] = SHORT + LONG
) -> tuple[ToolFigures, ...]:
    """The figures of each kind of chat, of the same chats each time."""
    return tuple(_figures(model, tokenizer, chats) for chats in kinds)


def evaluate_objects(model: Any, tokenizer: Any, count: int) -> tuple[int, int]:
    """How many JSON objects are right, word for word, of `count` that are asked for."""
    draw = Draw(_SEED, "held_out")
    right = 0
    for _ in range(count):
        turn = object_turn(draw)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn.user}], add_generation_prompt=True
        )
        right += _reply(model, tokenizer, prompt, make_prompt_cache(model)) == turn.answer
    return right, count


def evaluate_talk(model: Any, tokenizer: Any, count: int) -> dict[str, tuple[int, int]]:
    """How many answers are right without any tools, by task, of `count` each."""
    draw = Draw(_SEED, "held_out")
    makers = (
        chat.small_talk,
        chat.introduction,
        chat.arithmetic,
        chat.counting,
        chat.repeating,
        chat.out_of_scope,
    )
    turns = [make(draw) for make in makers for _ in range(count)]
    right, asked = Counter[str](), Counter(turn.task for turn in turns)
    for turn in turns:
        prompt = _prompt(tokenizer, ChatDocument("", ()), turn, called=False)
        right[turn.task] += _reply(model, tokenizer, prompt, make_prompt_cache(model)).strip() == turn.answer
    return {task: (right[task], asked[task]) for task in asked}


def _figures(model: Any, tokenizer: Any, chats: Chats) -> ToolFigures:
    draw = Draw(_SEED, "held_out")
    counts = [0] * 7
    lengths = []
    for _ in range(chats.count):
        beginning, calls, unmet = _beginning(draw, chats)
        start, cache = _start(model, tokenizer, beginning)
        lengths.append(len(start))
        for turn in calls:
            said = _asked(model, tokenizer, beginning, turn, start, cache)
            called, told = _parsed(said), ""
            assert turn.call
            wanted = {"name": turn.call.name, "arguments": json.loads(turn.call.arguments)}
            right = called == wanted
            if right:
                told = _asked(model, tokenizer, beginning, turn, start, cache, called=True)
            named = called is not None and called.get("name") == turn.call.name
            for index, hit in enumerate((True, bool(called), named, right, told == turn.answer)):
                counts[index] += hit
        for turn in unmet:
            counts[5] += 1
            counts[6] += not _parsed(_asked(model, tokenizer, beginning, turn, start, cache))
    return ToolFigures(chats.where, round(sum(lengths) / len(lengths)), chats.tools, *counts)


def _beginning(draw: Draw, chats: Chats) -> tuple[ChatDocument, list[Turn], list[Turn]]:
    """What comes before the asks, the asks for which a tool fits, and some for which none does."""
    *offered, other = offers(draw, chats.tools + 1)
    system = "You are a helpful assistant."
    turns: tuple[Turn, ...] = ()
    # A tool's signature has some 30 tokens.
    filled = chats.tokens - 30 * chats.tools
    if filled > 0 and chats.where == "system":
        system = tool_corpus.filler(draw, filled)
    elif filled > 0:
        turns = tuple(tool_corpus.history(draw, filled))
    calls = [call_turn(draw, draw.one(offered)) for _ in range(chats.asks)]
    unmet = [unmet_turn(draw, other, NO_TOOL) for _ in range(max(1, chats.asks // 3))]
    return ChatDocument(system, turns, tuple(offer.tool for offer in offered)), calls, unmet


def _start(model: Any, tokenizer: Any, beginning: ChatDocument) -> tuple[list[int], Any]:
    """The tokens that every ask after this beginning starts with, and the cache filled with them."""
    prompts = [
        _prompt(tokenizer, beginning, Turn("", user, "", "", ""), called=False)
        for user in ("What is this?", "Add 1.")
    ]
    length = next(index for index, pair in enumerate(zip(*prompts, strict=False)) if pair[0] != pair[1])
    start, cache = prompts[0][:length], make_prompt_cache(model)
    for first in range(0, length, 512):
        model(mx.array([start[first : first + 512]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return start, cache


def _prompt(tokenizer: Any, beginning: ChatDocument, turn: Turn, called: bool) -> list[int]:
    document = ChatDocument(beginning.system, (*beginning.turns, turn), beginning.tools)
    messages = document.messages(len(document.turns) - 1, called)
    ids: list[int] = tokenizer.apply_chat_template(
        messages, tools=document.definitions, add_generation_prompt=True
    )
    return ids


def _asked(
    model: Any,
    tokenizer: Any,
    beginning: ChatDocument,
    turn: Turn,
    start: list[int],
    cache: Any,
    called: bool = False,
) -> str:
    prompt = _prompt(tokenizer, beginning, turn, called)
    assert prompt[: len(start)] == start
    return _reply(model, tokenizer, prompt[len(start) :], copy.deepcopy(cache))


def _reply(model: Any, tokenizer: Any, prompt: list[int], cache: Any) -> str:
    text: str = mlx_lm.generate(model, tokenizer, prompt, max_tokens=_REPLY_TOKENS_MAX, prompt_cache=cache)
    return text


def _parsed(said: str) -> dict[str, Any] | None:
    """The call that a reply makes: strict JSON between the markers, and nothing around them."""
    found = _CALL.fullmatch(said.strip())
    try:
        call = json.loads(found[1]) if found else None
    except ValueError:
        return None
    return call if isinstance(call, dict) else None


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--long/--short", default=True, show_default=True, help="Also measure after thousands of tokens."
)
@click.option("--card", is_flag=True, help="Also write the figures into DIRECTORY/README.md.")
def main(directory: Path, long: bool, card: bool) -> None:
    """Print a model's figures as JSON."""
    figures = asdict(evaluate(directory, long))
    print(json.dumps(figures, indent=2))
    if card:
        write_card(directory, figures)


if __name__ == "__main__":
    main()
