"""Pico's tokenizer: byte-level BPE, so that any text round-trips, with a token for each role and the end."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.pico.corpus import Document, StoryDocument
from tools.pico.markers import ASSISTANT, END, SPECIAL_TOKENS, SYSTEM, USER
from tools.pico.template import response_text, system_text

# A tool's answer has no role of its own here: pico reads it as a system message.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '<|user|>' }}"
    "{%- elif message.role == 'assistant' -%}{{ '<|assistant|>' }}"
    "{%- else -%}{{ '<|system|>' }}"
    "{%- endif -%}"
    "{{- (message.content or '') | trim -}}{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A tokenizer learnt from `texts`, at most `vocabulary_size` tokens; every digit is its own token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[bool]]:
    """The token ids of a document and, for each, whether the model should learn to predict it.

    What the model must say is learnt (stories, answers, calls and the ends of all), what it is told is not. The
    text is exactly what the chat template renders.
    """
    if isinstance(document, StoryDocument):
        ids = _ids(tokenizer, document.text + END)
        return ids, [True] * len(ids)
    system = system_text(document.system, document.tools)
    pieces = [(f"{SYSTEM}{system}{END}", False)] if system else []
    for turn in document.turns:
        pieces += [(f"{USER}{turn.user}{END}{ASSISTANT}", False)]
        if turn.call:
            pieces += [(f"{turn.call.text}{END}", True)]
            pieces += [(f"{USER}{response_text(turn.call.answer)}{END}{ASSISTANT}", False)]
        pieces += [(f"{turn.answer}{END}", True)]
    all_ids: list[int] = []
    learnt: list[bool] = []
    for text, learn in pieces:
        ids = _ids(tokenizer, text)
        all_ids += ids
        learnt += [learn] * len(ids)
    return all_ids, learnt


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
