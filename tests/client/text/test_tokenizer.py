"""The tokenizer bundle: text to ids and back, and its cache."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer as RawTokenizer

from zmqengine.engine.fake.fake_tokenizer import CHAT_TEMPLATE, fake_tokenizer_json
from zmqengine.errors import BadRequest
from zmqengine.pico import model_path
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.text import tokenizer_cache
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tokenizer_cache import TokenizerDirectory
from zmqengine_client.text.word_table import CHARACTERS_MAX


def bundle(name: str = "h1", **fields: object) -> TokenizerBundle:
    """The fake engine's tokenizer."""
    whole = TokenizerBundle(
        call=3,
        hash=name,
        tokenizer_json=fake_tokenizer_json(300),
        chat_template=CHAT_TEMPLATE,
        eos_token_ids=[0],
        special_tokens={"eos_token": "<end>"},
        facts={"thinking": True},
    )
    return msgspec.structs.replace(whole, **fields)


def test_text_goes_to_ids_and_back() -> None:
    """Any text, and the facts of the bundle are there."""
    tokenizer = Tokenizer(bundle())
    assert tokenizer.decode(tokenizer.encode("Grüße 日")) == "Grüße 日"
    assert tokenizer.decode([0, *tokenizer.encode("a")]) == "a"
    assert tokenizer.decode([0], skip_special_tokens=False) == "<end>"
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.facts == {"thinking": True}


def test_a_chat_is_laid_out_by_the_template_and_encoded_without_further_tokens() -> None:
    """The template writes the special tokens itself."""
    tokenizer = Tokenizer(bundle())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "user: hi\nassistant: "
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert tokenizer.decode(ids) == "user: hi\n"


def test_special_tokens_and_own_variables_reach_the_template() -> None:
    """bos_token and its like are variables, and so is what the caller adds."""
    tokenizer = Tokenizer(bundle(chat_template="{{ eos_token }}{{ mood }}{{ tools | tojson }}"))
    assert tokenizer.apply_chat_template([], tools=[{"a": 1}], mood="x") == '<end>x[{"a": 1}]'


def test_a_model_without_a_template_refuses_chats_by_name() -> None:
    """The error says what to use instead."""
    with pytest.raises(BadRequest, match="no chat template"):
        Tokenizer(bundle(chat_template=None)).encode_chat([{"role": "user", "content": "hi"}])


def test_truncation_and_padding_left_on_by_training_are_turned_off() -> None:
    """A prompt is never cut or filled up in silence."""
    raw = RawTokenizer.from_buffer(fake_tokenizer_json(300))
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    tokenizer = Tokenizer(bundle(tokenizer_json=raw.to_str().encode()))
    assert len(tokenizer.encode("12345678")) == 8


def test_words_of_a_long_call_are_not_looked_up() -> None:
    """The library lets other threads run, and tokenizes them on all cores."""
    tokenizer = Tokenizer(bundle(tokenizer_json=(model_path("pico-embed") / "tokenizer.json").read_bytes()))
    raw = RawTokenizer.from_str(tokenizer.to_json().decode())
    text = "a kite " * (CHARACTERS_MAX // 7)
    for repeats, knows in ((2, False), (1, True)):
        texts = [text] * repeats
        assert tokenizer.encode_all(texts) == [raw.encode(text).ids] * repeats
        assert tokenizer.knows_words is knows


@pytest.mark.parametrize("text", [3, None, b"bytes", "\ud800"])
def test_what_is_no_text_is_refused(text: object) -> None:
    """Typed, not whatever the library raises."""
    with pytest.raises(BadRequest):
        Tokenizer(bundle()).encode(text)  # type: ignore[arg-type]


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    """A worker of another make may send anything."""
    with pytest.raises(BadRequest, match="tokenizer"):
        Tokenizer(bundle(tokenizer_json=b"{}"))


def test_the_disk_cache_gives_back_what_was_stored(tmp_path: Path) -> None:
    """By hash, and only that one."""
    cache = TokenizerDirectory(tmp_path)
    assert cache.load("h1") is None
    cache.store(bundle())
    assert cache.load("h1") == bundle()
    assert cache.load("h2") is None


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path: Path, damage: str) -> None:
    """It is fetched again, and the file is whole again after that."""
    cache = TokenizerDirectory(tmp_path)
    cache.store(bundle())
    (path,) = (tmp_path / "tokenizers").iterdir()
    content = path.read_bytes()
    if damage == "other":
        cache.store(bundle("h2"))
        (other,) = [file for file in (tmp_path / "tokenizers").iterdir() if file != path]
        os.replace(other, path)
    else:
        flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
        path.write_bytes({"cut": content[:-1], "flip": flipped, "empty": b""}[damage])
    assert cache.load("h1") is None
    cache.store(bundle())
    assert cache.load("h1") == bundle()


def test_the_disk_cache_is_bounded_and_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number and in bytes; no half-written files are left."""
    cache = TokenizerDirectory(tmp_path)
    for number in range(12):
        cache.store(bundle(f"h{number}"))
        for path in (tmp_path / "tokenizers").iterdir():
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    names = list((tmp_path / "tokenizers").iterdir())
    assert len(names) == tokenizer_cache.FILES_MAX
    assert cache.load("h11") is not None
    assert cache.load("h0") is None
    monkeypatch.setattr(tokenizer_cache, "CACHE_BYTES_MAX", 1)
    cache.store(bundle("last"))
    assert [path.suffix for path in (tmp_path / "tokenizers").iterdir()] == [".bundle"]
    assert cache.load("last") is not None


def test_a_hash_cannot_leave_the_cache_directory(tmp_path: Path) -> None:
    """The hash comes from the worker."""
    cache = TokenizerDirectory(tmp_path / "cache")
    cache.store(bundle("../../../evil"))
    assert cache.load("../../../evil") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A read-only home must not stop anybody."""
    (tmp_path / "tokenizers").write_text("a file where the directory should be")
    cache = TokenizerDirectory(tmp_path)
    cache.store(bundle())
    assert cache.load("h1") is None
