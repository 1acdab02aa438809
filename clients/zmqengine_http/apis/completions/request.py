"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from zmqengine.protocol.messages import LogprobCount
from zmqengine.sampling_params import TokenId
from zmqengine_http.apis.openai_api.generation_request import (
    GENERATION_FIELDS,
    GenerationRequest,
    check_generation,
)
from zmqengine_http.serving.body import Body, refused
from zmqengine_http.serving.errors import bad_field

Prompt = (
    str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    logprobs: LogprobCount | None = None

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


COMPLETION_BODY = Body(
    CompletionRequest,
    (
        *GENERATION_FIELDS,
        refused("echo", "", False),
        refused("best_of", "use n", 1),
    ),
    check=check_generation,
)
