"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from zmqengine.protocol.messages import LogprobCount
from zmqengine.sampling_params import TOKEN_ID_MAX, TokenId
from zmqengine_http.apis.openai_api.generation_request import (
    GENERATION_FIELDS,
    GenerationRequest,
    check_generation,
)
from zmqengine_http.apis.openai_api.interfaces import ALL_THAT_FITS, SYNONYMS, translate_fields
from zmqengine_http.serving.body import Body, refused
from zmqengine_http.serving.errors import bad_field

Prompt = (
    str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
)


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for max_tokens of /v1/completions."""


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    logprobs: LogprobCount | None = None
    echo: bool = False
    max_tokens: Annotated[int, Meta(ge=ALL_THAT_FITS, le=TOKEN_ID_MAX)] = DEFAULT_MAX_TOKENS

    @property
    def tokens_max(self) -> int | None:
        """The limit of the output; None for all that the context leaves."""
        return None if self.max_tokens == ALL_THAT_FITS else self.max_tokens

    @property
    def scores_prompts(self) -> bool:
        """Whether the logprobs include those of the prompts."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises a 400 for a list that mixes both."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        others = [item for item in self.prompt if not isinstance(item, int)]
        if (ids and others) or len({type(item) for item in others}) > 1:
            raise bad_field("prompt", "a list holds strings, token ids or lists of token ids, not a mixture")
        return [ids] if ids else others


def _check(request: CompletionRequest) -> None:
    check_generation(request)
    if request.max_tokens == 0 and not request.scores_prompts:
        raise bad_field(
            "max_tokens",
            "at least 1, or 0 with echo and logprobs; -1 is all that the context leaves",
        )
    if request.scores_prompts and request.suffix:
        raise bad_field("echo", "with a suffix the logprobs of the prompt are not those of a text")
    if request.scores_prompts and request.guided is not None:
        raise bad_field("echo", "logprobs of the prompt cannot go with a constraint")


COMPLETION_BODY = Body(
    CompletionRequest,
    (
        *GENERATION_FIELDS,
        refused("best_of", "use n", 1),
    ),
    synonyms=SYNONYMS,
    translate=translate_fields,
    check=_check,
)
