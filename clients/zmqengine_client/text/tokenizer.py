"""Text to token ids and back, with the tokenizer of the model that the worker serves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.decoders import ByteLevel

from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine.vision_card import VisionCard
from zmqengine_client.text.detokenizer import ByteDetokenizer, Detokenizer, piece_bytes
from zmqengine_client.text.segment_cache import TEXT_CHARS_MIN, SegmentCache
from zmqengine_client.text.word_table import CHARACTERS_MAX, WordTable

if TYPE_CHECKING:
    from zmqengine_client.text.chat_template import ChatTemplate


class Tokenizer:
    """The model's tokenizer and chat template. Safe to use from several threads.

    `facts` describe the model's text format, such as the markers of reasoning and of tool calls.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.hash = bundle.hash
        self.eos_token_ids = frozenset(bundle.eos_token_ids)
        self.special_tokens: Mapping[str, str] = dict(bundle.special_tokens)
        self.chat_template = bundle.chat_template
        self.facts: Mapping[str, str | bool | int] = dict(bundle.facts)
        self.vision = bundle.vision
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(bundle.tokenizer_json)
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise BadRequest(f"the worker's tokenizer cannot be read: {error}") from None
        # Training may have left these on: a prompt must never be truncated or padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {id_: token.content for id_, token in added.items()}
        self._byte_level = isinstance(self._tokenizer.decoder, ByteLevel)
        self._by_byte = "ByteLevel" in repr(self._tokenizer.decoder)
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._templates: dict[str, ChatTemplate] = {}
        self._segments = SegmentCache(self._tokenizer, self._encode_parts)
        self._words = WordTable.of(self._tokenizer, self._encode_batch)

    def to_json(self) -> bytes:
        """The tokenizer as a `tokenizer.json`, for programs that build their own."""
        return self._tokenizer.to_str().encode()

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text, such as a special one; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds the model's tokens at the start of a text, such as BOS."""
        if not isinstance(text, str):
            raise BadRequest(f"a text must be a str, not {type(text).__name__}")
        try:
            if not add_special_tokens and len(text) >= TEXT_CHARS_MIN:
                return self._segments.encode(text)
            return self._encode_batch([text], add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError):
            # The library raises this for an unpaired surrogate.
            raise BadRequest("the text is not valid Unicode") from None

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, as `encode` gives them; many are computed on all cores."""
        try:
            if self._words is not None and add_special_tokens and sum(map(len, texts)) <= CHARACTERS_MAX:
                return self._words.encode(texts)
            return self._encode_batch(texts, add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise BadRequest("a text is not valid Unicode") from None

    @property
    def knows_words(self) -> bool:
        """Whether the words of the last texts of `encode_all` were known: texts like these take a tenth of the time."""
        return self._words is not None and self._words.knew_all

    def encode_pairs(self, first: str, others: Sequence[str]) -> list[tuple[list[int], int]]:
        """Token ids of `first` with each of the others as a pair, and where the second one begins there."""
        try:
            encoded = self._tokenizer.encode_batch([(first, other) for other in others])
        except (TypeError, UnicodeEncodeError):
            raise BadRequest("a text is not valid Unicode") from None
        pairs = []
        for encoding in encoded:
            parts = encoding.type_ids if any(encoding.type_ids) else encoding.sequence_ids
            pairs.append((encoding.ids, parts.index(1) if 1 in parts else 0))
        return pairs

    @functools.cached_property
    def tail(self) -> list[int]:
        """The special tokens that the tokenizer puts behind a text."""
        alone, text = self.encode(""), self.encode("a")
        count = 0
        while count < min(len(alone), len(text) - 1) and alone[-1 - count] == text[-1 - count]:
            count += 1
        return text[len(text) - count :]

    def _encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The batch call releases the GIL; `encode` holds it throughout.
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]

    def _encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_batch(texts, add_special_tokens=False)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """The most UTF-8 bytes of any token. Slow the first time: it looks at every token."""
        return max(
            # A byte-level vocabulary writes each byte as one character.
            len(token) if self._by_byte and id_ not in self._added else len(token.encode())
            for token, id_ in self._tokenizer.get_vocab().items()
        )

    def token_bytes(self, id_: int) -> bytes:
        """The bytes of a token, special tokens as their text; empty for an id without a token."""
        if id_ in self._added:
            return self._added[id_].encode()
        piece = self._tokenizer.id_to_token(id_)
        return b"" if piece is None else piece_bytes(piece, by_byte=self._by_byte)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text for a conversation. `kwargs` are further variables of the template.

        A model may have a separate template for chats with tools. Raises `BadRequest` if the model has no chat
        template, or with the template's error.
        """
        template = self._compiled_template(tools=bool(tools))
        if template is None:
            raise BadRequest("the model has no chat template: use generate() with a prompt")
        variables = {
            **self.special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        return template.render(messages, variables)

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads; empty without one. Raises `BadRequest` if it is invalid."""
        return self.variables_of_template(tools=False)

    def variables_of_template(self, *, tools: bool) -> frozenset[str]:
        """The variables of the template for chats with or without tools."""
        template = self._compiled_template(tools=tools)
        return template.variables if template else frozenset()

    def compared_in_template(self, *, tools: bool) -> frozenset[str]:
        """The texts that the template for chats with or without tools compares something with, such as roles."""
        template = self._compiled_template(tools=tools)
        return template.compared if template else frozenset()

    def template_for(self, *, tools: bool) -> str | None:
        """The chat template, or the one that the model has for chats with tools."""
        named = self.facts.get("chat_template_tool_use") if tools else None
        return named if isinstance(named, str) and named else self.chat_template

    def _compiled_template(self, *, tools: bool) -> ChatTemplate | None:
        source = self.template_for(tools=tools)
        if source is None:
            return None
        if source not in self._templates:
            # Imported here: Jinja is a tenth of the client's import time, and completions do not need it.
            from zmqengine_client.text.chat_template import ChatTemplate

            self._templates[source] = ChatTemplate(source)
        return self._templates[source]

    @property
    def vision_card(self) -> VisionCard:
        """The preparation of images for the model. Raises `BadRequest` for a model that sees none."""
        if self.vision is None:
            because = f" ({self.blind})" if self.blind else ""
            raise BadRequest(
                f"the model sees no images{because}: leave them out, or choose a model with a vision card"
            )
        return self.vision

    @property
    def blind(self) -> str:
        """The reason for which a model that was made to see takes no images from this worker; else empty."""
        return str(self.facts.get("blind", ""))

    @property
    def image_marker(self) -> str:
        """The text that stands for an image in a prompt. Raises `BadRequest` for a model that sees none."""
        return self.token_bytes(self.vision_card.placeholder).decode("utf-8", "replace")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """Token ids of the prompt for a conversation. Special tokens come from the template."""
        text = self.apply_chat_template(messages, tools=tools, **chat_template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer | ByteDetokenizer:
        """A new incremental detokenizer for one stream."""
        if self._byte_level:
            return ByteDetokenizer(self._plain_bytes if skip_special_tokens else self._all_bytes)
        skip = self._special_ids if skip_special_tokens else ()

        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=False)

        return Detokenizer(decode, skip)

    @functools.cached_property
    def _all_bytes(self) -> Callable[[int], bytes]:
        """The bytes of a token by a byte-level decoder, cached: streams look up each of their tokens."""

        @functools.cache
        def bytes_of(id_: int) -> bytes:
            piece = self._tokenizer.id_to_token(id_)
            return b"" if piece is None else piece_bytes(piece, by_byte=True)

        return bytes_of

    @functools.cached_property
    def _plain_bytes(self) -> Callable[[int], bytes]:
        """The bytes of a token, empty for special tokens; cached."""
        all_bytes, special = self._all_bytes, self._special_ids
        return functools.cache(lambda id_: b"" if id_ in special else all_bytes(id_))
