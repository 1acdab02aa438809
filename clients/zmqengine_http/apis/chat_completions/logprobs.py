"""Log-probabilities as chat completions have them."""

from __future__ import annotations

from zmqengine_http.answers.answer_events import Logprobs
from zmqengine_http.apis.openai_api.logprobs import LOWEST
from zmqengine_http.workers.worker import Model


def chat_logprobs(model: Model, top: int, logprobs: Logprobs) -> dict[str, object]:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`.

    The `bytes` of neighbouring tokens together are text, also where a token is part of a character.
    """
    entries = [
        {
            **_entry(model, token, entry.logprob),
            "top_logprobs": [_entry(model, id_, logprob) for id_, logprob in entry.top[:top]],
        }
        for token, entry in zip(logprobs.tokens, logprobs.entries, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _entry(model: Model, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": model.token_text(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(model.tokenizer.token_bytes(token)),
    }
