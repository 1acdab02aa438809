"""The model card of pico-tools: what it is, how it was made and what was measured."""

import json
from pathlib import Path
from typing import Any

_CARD = """\
---
license: apache-2.0
language: en
library_name: mlx
pipeline_tag: text-generation
---

# pico-tools

A very small language model that ships with zmqengine, so that programs with tools can be tried with no network and no
download. It calls a tool that a program offers it, tells what the tool answered, and writes small JSON objects
from a sentence. It exchanges a few greetings, and knows nothing else.

| | |
|---|---|
| shape | qwen3, {layers} layers, width {width}, {heads} query heads, {kv_heads} key heads, tied embeddings |
| parameters | {parameters:,}, float32 |
| vocabulary | {vocabulary} tokens, byte-level BPE, each digit a token; any text round-trips |
| context | {context} tokens; few training documents have more than {long_tokens}, see below |
| tools | OpenAI's function schemas, shown to it as signatures; calls as Qwen and Hermes write them |
| license | Apache-2.0, as the rest of zmqengine |

## What it cannot do

It is a model to try programs with, not to rely on: the figures below say how often it is wrong.

- It works near the beginning of a chat only. The context holds {context} tokens, but after some 2,000 it finds neither
  the tools nor the ask any more, and calls what is not there or nothing: the table shows it.
- It calls something nearly always, also where no tool fits.
- It calls one tool for one ask. It does not call several at once, nor one after the other to reach a goal.
- It finds a tool by words that ask and description share. With one tool it is mostly right; the more are offered, the
  more often it takes a wrong one, or makes up a name.
- It copies arguments out of the ask, and does not infer, reformat or leave out any. Lists and nested objects it
  cannot write. Rare names may be copied wrong: look at the arguments before you act on them.
- It does not follow instructions in a system prompt, write stories, count or add as pico does, read code, or know
  any language other than English.

## How it was made

Out of pico and no outside data. `tools/pico/tools/corpus.py` writes the corpus from a seed and a grammar;
`tools/pico/tools/train.py` gives pico a tokenizer in which a word is cut alike with and without a space before
it (embeddings of new tokens begin as means of the old ones), slows its slow rotary frequencies for 8,192 positions,
and trains it with MLX {mlx}. This copy:

    {command}

| stage | steps | tokens a step, at most | documents |
|---|---|---|---|
| tools | {tool_steps} | {batch_tokens} | chats with tools, objects, and what pico learnt from |
| names | {name_steps} | {batch_tokens} | many with names that cannot be guessed |
| near | {near_steps} | {batch_tokens} | the same, without gaps |
| short | {short_steps} | {short_batch_tokens} | short chats with one tool, later with up to five |
| last | {last_steps} | {short_batch_tokens} | chats with one to eight tools, objects, greetings, some long beginnings |

In the first two stages half of the batches, in the last a quarter, have a gap in their positions, so that short texts
teach long distances. The number of steps was settled by how the run went; it was stopped between the stages.
Train and held-out documents share no tool (name and parameters together), no ask and no facts of an object. Tools of
one kind, such as weather, are in both under other names.

## Measured

By `python -m tools.pico.tools.evaluate DIR --card`, greedy, on tools and asks that training did not hold. "Whole"
are calls of whole, strict JSON, "tool" those of the right tool, "arguments" those with the right arguments too, "told"
the answers that were then told word for word as they should be; "none fits" the asks that no tool was for and that
were left alone.

| before the ask | tools | asks | whole | tool | arguments | told | none fits |
|---|---|---|---|---|---|---|---|
{tools}

JSON objects right word for word: {objects_right} of {objects_asked}. Without tools:

| task | right | asked |
|---|---|---|
{talk}

Held-out loss: {held_out_loss:.4f} nats per learnt token.
"""
_PLACES = {"system": "of system prompt and tools", "chat": "of tools and chat"}


def write_card(directory: Path, figures: dict[str, Any]) -> None:
    """Write `directory`/README.md from the measured `figures` and the `training.json` beside it."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    training = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    card = _CARD.format(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        parameters=training["parameters"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        mlx=training["mlx"],
        command=training["command"],
        held_out_loss=training["held_out_loss"],
        objects_right=figures["objects_right"][0],
        objects_asked=figures["objects_right"][1],
        tools="\n".join(map(_tool_row, figures["tools"])),
        talk="\n".join(
            f"| {task} | {right} | {asked} |" for task, (right, asked) in figures["talk_right"].items()
        ),
        **training["plan"],
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def _tool_row(figures: dict[str, Any]) -> str:
    shares = [figures[name] / figures["asked"] for name in ("valid", "named", "right", "told")]
    shares.append(figures["left_alone"] / figures["unmet"])
    row = [
        f"{figures['tokens']:,} tokens {_PLACES[figures['where']]}",
        str(figures["tools"]),
        str(figures["asked"]),
        *(f"{100 * share:.0f} %" for share in shares),
    ]
    return f"| {' | '.join(row)} |"
