"""Log-probabilities as chat completions have them."""

from __future__ import annotations

from collections.abc import Callable

from zmqengine_http.answer_events import Logprobs
from zmqengine_http.openai_api.logprobs import LOWEST


def chat_logprobs(text_of: Callable[[int], str], top: int, logprobs: Logprobs) -> dict[str, object]:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""
    entries = [
        {
            **_entry(text_of(token), entry.logprob),
            "top_logprobs": [_entry(text_of(id_), logprob) for id_, logprob in entry.top[:top]],
        }
        for token, entry in zip(logprobs.tokens, logprobs.entries, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, object]:
    # Part of a character: its bytes are not known from its text.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": raw}
