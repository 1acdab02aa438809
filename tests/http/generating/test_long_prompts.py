"""A prompt that is long holds up nobody, and one that is far too long costs next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers

import zmqengine.pico
from tests.http.front import Front, chat, post, serving
from tests.http.scripted import ScriptedClient
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http import HttpConfig

PICO = Path(zmqengine.pico.__file__).parent / "model" / "tokenizer.json"
WORDS = "The quick brown fox jumps over the lazy dog. "


def bundle(json: bytes) -> TokenizerBundle:
    """A bundle of this tokenizer alone."""
    return TokenizerBundle(call=0, hash="t", tokenizer_json=json, chat_template=None, eos_token_ids=[0])


@pytest.fixture(scope="module")
def pico() -> Tokenizer:
    """The tokenizer of the bundled model."""
    return Tokenizer(bundle(PICO.read_bytes()))


def test_other_threads_run_while_a_megabyte_is_tokenised(pico: Tokenizer) -> None:
    """Counted, not timed: with the interpreter held for the whole time the other thread has no turn in between."""
    text = WORDS * (1_000_000 // len(WORDS))
    turns = 0
    done = threading.Event()
    waiting = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            waiting.set()
            turns += 1
            time.sleep(0.001)

    counting = threading.Thread(target=count)
    counting.start()
    assert waiting.wait(60)
    before = turns
    tokens = pico.encode(text)
    during = turns - before
    done.set()
    counting.join(60)
    assert len(tokens) > 100_000
    # One turn at most, were the interpreter held all the time.
    assert during >= 4


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["", "a", "Hello, world!", "é👍 \u200b", "<|user|>\nHi<|end|>", WORDS * 50])
def test_ids_are_those_of_the_plain_call(text: str, special: bool) -> None:
    """With a tokenizer that adds a token at the start and one that does not."""
    plain = tokenizers.Tokenizer.from_str(PICO.read_text())
    plain.no_truncation()
    ours = Tokenizer(bundle(plain.to_str().encode()))
    assert ours.encode(text, special) == plain.encode(text, add_special_tokens=special).ids
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", plain.token_to_id("<|user|>"))]
    )
    ours = Tokenizer(bundle(plain.to_str().encode()))
    assert ours.encode(text, special) == plain.encode(text, add_special_tokens=special).ids
    assert (ours.encode(text, special)[:1] == [plain.token_to_id("<|user|>")]) or not special


def test_no_token_is_longer_than_the_longest(pico: Tokenizer) -> None:
    """The bound that long texts are held against."""
    vocabulary = tokenizers.Tokenizer.from_str(PICO.read_text()).get_vocab_size()
    lengths = [len(pico.decode([id_], skip_special_tokens=False).encode()) for id_ in range(vocabulary)]
    assert max(lengths) <= pico.longest_token_bytes <= 2 * max(lengths)


class PicoClient(ScriptedClient):
    """Scripted, but with a context of 2,048 and pico's tokenizer, counting what is tokenised."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "yes")
        self.bundle = bundle(PICO.read_bytes())
        self._tokenizer = Counting(
            TokenizerBundle(
                call=0, hash="counting", tokenizer_json=PICO.read_bytes(),
                chat_template="{{ messages[0].content }}", eos_token_ids=[0],
            )
        )  # fmt: skip


class Counting(Tokenizer):
    """A tokenizer that counts the characters it was given."""

    characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        Counting.characters += len(text)
        return super().encode(text, add_special_tokens)

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        Counting.characters += sum(map(len, texts))
        return super().encode_all(texts, add_special_tokens)


@pytest.fixture
def front() -> Iterator[Front]:
    with serving(HttpConfig(), lambda address, on_event: PicoClient()) as front:
        Counting.characters = 0
        yield front


@pytest.mark.parametrize("text", ["a " * 5_000_000, "x" * 10_000_000], ids=["words", "one-word"])
def test_ten_megabytes_for_a_small_context_are_refused_untokenised(front: Front, text: str) -> None:
    """15 s of CPU and 2.5 GB, before: any client could do that to all others."""
    for path, body in (
        ("/v1/chat/completions", chat(text)),
        ("/v1/completions", {"prompt": text}),
    ):
        reply = post(front, path, body)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert Counting.characters == 0


def test_what_may_fit_by_its_bytes_is_counted_no_further_than_the_context(front: Front) -> None:
    """Some vocabularies have a token of 128 spaces: by bytes alone megabytes of words could fit."""
    (worker,) = front.service.pool.workers
    assert worker.model
    worker.model.tokenizer.__dict__["longest_token_bytes"] = 4096
    text = "a " * 2_000_000
    reply = post(front, "/v1/completions", {"prompt": text})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert 0 < Counting.characters < len(text) / 20
