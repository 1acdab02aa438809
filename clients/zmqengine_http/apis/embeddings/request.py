"""The bodies of /v1/embeddings, /embed and of the rerank endpoints.

Sources: https://platform.openai.com/docs/api-reference/embeddings, https://docs.cohere.com/reference/rerank,
https://api.jina.ai/redoc, https://huggingface.github.io/text-embeddings-inference (TEI).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from zmqengine.protocol.messages import CacheScope, DeadlineMs, Priority
from zmqengine.sampling_params import TOKEN_ID_MAX, TokenId
from zmqengine_client.core.embedding import BATCH, EmbedOptions
from zmqengine_http.generating.generation import caller_salt
from zmqengine_http.serving.body import Body, ignored, refused, reported
from zmqengine_http.serving.errors import bad_field
from zmqengine_http.workers.worker import Model

Text = str | Annotated[list[TokenId], Meta(min_length=1)]
Input = (
    str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
)
PositiveInt = Annotated[int, Meta(ge=1, le=TOKEN_ID_MAX)]


class VectorRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of all endpoints that compute vectors."""

    model: str | None = None
    truncate: bool = False
    priority: Priority = BATCH
    deadline_ms: DeadlineMs | None = None
    cache_scope: CacheScope | None = None

    def options(self, caller: str, model: Model) -> EmbedOptions:
        """The client library's options. Raises a 400 for a scope that the worker would not keep apart."""
        return {
            "truncate": self.truncate,
            "priority": self.priority,
            "deadline_ms": self.deadline_ms,
            "cache_scope": self.cache_scope,
            "cache_salt": caller_salt(caller, self.cache_scope, model),
        }


class EmbeddingRequest(VectorRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings."""

    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: PositiveInt | None = None
    prompt_name: str | None = None

    @property
    def texts(self) -> list[Text]:
        """The inputs, each a text or token ids. Raises a 400 for a list that mixes both."""
        return _texts_of("input", self.input)


class TeiEmbedRequest(VectorRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /embed, as TEI's."""

    inputs: Input
    dimensions: PositiveInt | None = None
    prompt_name: str | None = None

    @property
    def texts(self) -> list[Text]:
        """The texts, checked as those of `EmbeddingRequest`."""
        return _texts_of("inputs", self.inputs)


def _texts_of(name: str, given: Input) -> list[Text]:
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    others = [item for item in given if not isinstance(item, int)]
    if (ids and others) or len({type(item) for item in others}) > 1:
        raise bad_field(name, "a list holds strings, token ids or lists of token ids, not a mixture")
    return [ids] if ids else list(others)


class RerankDocument(Struct, frozen=True):
    """A document as an object with its text."""

    text: str


class RerankRequest(VectorRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/rerank, /rerank and /v2/rerank: with `documents` as Jina's and Cohere's, with `texts` as
    TEI's."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1)] | None = None
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    top_n: PositiveInt | None = None
    return_documents: bool = False
    return_text: bool = False
    instruction: str | None = None

    @property
    def passages(self) -> list[str]:
        """The text of each document."""
        if self.texts is not None:
            return self.texts
        return [each if isinstance(each, str) else each.text for each in self.documents or ()]


def _has_one_list(request: RerankRequest) -> None:
    if (request.documents is None) == (request.texts is None):
        raise bad_field("documents", "give documents as Jina does, or texts as TEI does, and not both")


_SHARED = (ignored("user", "it changes no vector"),)

EMBEDDING_BODY = Body(
    EmbeddingRequest,
    (
        *_SHARED,
        reported("input_type", "use prompt_name, where the model has prompts"),
        reported("task", "use prompt_name, where the model has prompts"),
        refused("normalized", "embeddings always have length 1", True),
        refused("truncate_prompt_tokens", "truncate: true cuts texts that are too long for the model", -1),
    ),
)
_CUT_AT_END = refused("truncation_direction", "a text is cut at its end", "right", "Right")
TEI_EMBED_BODY = Body(
    TeiEmbedRequest, (_CUT_AT_END, refused("normalize", "embeddings always have length 1", True))
)
RERANK_BODY = Body(
    RerankRequest,
    (
        *_SHARED,
        _CUT_AT_END,
        refused("raw_scores", "scores are from 0 to 1", False),
        reported("max_chunks_per_doc", "a document is one chunk"),
        reported("max_tokens_per_doc", "truncate: true cuts texts that are too long for the model"),
        refused("rank_fields", "give each document as one text", []),
    ),
    check=_has_one_list,
)
