"""The model card: what the model is, how it was made and what was measured."""

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

# pico

A very small language model that ships with zmqengine, so that the first command runs with no network and no
download. It writes short plain English stories from an opening such as "Once upon a time", and answers simple
chats: greetings, counting, repeating, arithmetic of small numbers, and questions about the story just told.
It knows nothing else.

| | |
|---|---|
| shape | qwen3, {layers} layers, width {width}, {heads} query heads, {kv_heads} key heads, tied embeddings |
| parameters | {parameters:,}, float32 |
| vocabulary | {vocabulary} tokens, byte-level BPE, each digit a token; any text round-trips |
| context | {context} tokens declared; most training documents have fewer than 400 |
| license | Apache-2.0, as the rest of zmqengine |

## How it was made

By two scripts and no outside data. `tools/pico/corpus.py` writes the corpus from a seed and a grammar;
`tools/pico/train.py` trains tokenizer and model on it with MLX {mlx}. This copy:

    {command}

which is {steps} steps of at most {batch_tokens} tokens, Muon for the matrices and Adam for the rest.
Train and held-out documents share no story (hero, plot and thing), no wording of a sum, no list of words to
repeat and no wording of a count. Every sum was seen in other words: its figure below says nothing of pairs of
numbers never seen.

## Measured

By `python -m tools.pico.evaluate DIR --card`, on held-out documents, at most {tokens_max} tokens a reply:

| | greedy | temperature 0.7 |
|---|---|---|
| stories that end by themselves, of {story_prompts} openings | {stories_greedy} | {stories_sampled} |
| sentences that the corpus's grammar allows | {sentences_greedy} | {sentences_sampled} |
| answers that end by themselves, of {chat_prompts} | {chats_greedy} | {chats_sampled} |

Held-out loss: {held_out_loss:.4f} nats per learnt token. A greedy story goes on for {story_tokens:.0f} tokens
on average.

| task, greedy | right | asked |
|---|---|---|
{answers}

Small talk, recall of a name and the assistant's own name use wordings that training has too.

## Samples, greedy

{samples}
"""


def write_card(directory: Path, figures: dict[str, Any]) -> None:
    """Write `directory`/README.md from the measured `figures` and the `training.json` beside it."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    training = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    answers = "\n".join(
        f"| {task} | {right} | {asked} |" for task, (right, asked) in figures["answers_right"].items()
    )
    samples = "\n\n".join(f"**{prompt}**\n\n> {reply}" for prompt, reply in figures["samples"])
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
        steps=training["plan"]["steps"],
        batch_tokens=training["plan"]["batch_tokens"],
        tokens_max=figures["tokens_max"],
        story_prompts=figures["story_prompts"],
        stories_greedy=_percent(figures["stories_ended_greedy"]),
        stories_sampled=_percent(figures["stories_ended_sampled"]),
        sentences_greedy=_percent(figures["sentences_in_grammar_greedy"]),
        sentences_sampled=_percent(figures["sentences_in_grammar_sampled"]),
        chat_prompts=figures["chat_prompts"],
        chats_greedy=_percent(figures["chats_ended_greedy"]),
        chats_sampled=_percent(figures["chats_ended_sampled"]),
        held_out_loss=figures["held_out_loss"],
        story_tokens=figures["story_tokens_mean"],
        answers=answers,
        samples=samples,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
