"""litellm against a front-end: `python litellm_checks.py URL` with a Python that has it, one JSON line a check."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import litellm  # type: ignore[import-not-found, unused-ignore]

HELLO = [{"role": "user", "content": "Hello"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
URL = sys.argv[1] + "/v1"
PLAIN: dict[str, Any] = {"model": "openai/scripted", "api_base": URL, "api_key": "none", "max_retries": 0}


def same(found: object, wanted: object) -> None:
    """Raise unless they are equal."""
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def ask(**options: Any) -> Any:
    """One completion."""
    return litellm.completion(**{**PLAIN, "messages": HELLO, **options})


def streamed() -> None:
    """The pieces join to the text."""
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    same("".join(pieces), "You said: Hello")


def asynchronous() -> None:
    """acompletion."""

    async def run() -> Any:
        return await litellm.acompletion(**PLAIN, messages=HELLO)

    same(asyncio.run(run()).choices[0].message.content, "You said: Hello")


def tools() -> None:
    """A call and its result."""
    message = ask(tools=[ADD]).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    answer = ask(tools=[ADD], messages=[*HELLO, message.model_dump(), result])
    same(answer.choices[0].message.content, "It is 3.")


def raises(kind: str, **options: Any) -> None:
    """The exception of litellm's own that a caller looks for."""
    try:
        ask(**options)
    except Exception as error:  # noqa: BLE001 - its class is what is looked at
        same(type(error).__name__, kind)
        return
    raise AssertionError("no error")


CACHED = [
    {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}
]
CHECKS: dict[str, Callable[[], object]] = {
    "completion": lambda: same(ask().choices[0].message.content, "You said: Hello"),
    "completion, streamed": streamed,
    "acompletion": asynchronous,
    "max_tokens 32000": lambda: same(ask(max_tokens=32000).choices[0].finish_reason, "stop"),
    "reasoning_effort": lambda: ask(reasoning_effort="high", allowed_openai_params=["reasoning_effort"]),
    "cache_control in a part": lambda: ask(messages=CACHED),
    "text_completion": lambda: litellm.text_completion(
        model="text-completion-openai/scripted", api_base=URL, api_key="none", prompt="Hello"
    ),
    "tool loop": tools,
    "an unknown model": lambda: raises("NotFoundError", model="openai/unknown"),
    "a prompt beyond the context": lambda: raises(
        "ContextWindowExceededError", messages=[{"role": "user", "content": "a" * 9000}]
    ),
    "hosted_vllm": lambda: same(
        ask(model="hosted_vllm/scripted").choices[0].message.content, "You said: Hello"
    ),
    "responses": lambda: litellm.responses(**PLAIN, input="Hello"),
    "anthropic messages": lambda: asyncio.run(
        litellm.anthropic_messages(
            model="anthropic/scripted", api_base=sys.argv[1], api_key="none", messages=HELLO, max_tokens=100
        )
    ),
    "tool_choice required": lambda: ask(tools=[ADD], tool_choice="required"),
    "response_format json_schema": lambda: ask(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    ),
    "embedding": lambda: litellm.embedding(
        model="openai/scripted", api_base=URL, api_key="none", input=["Hello"]
    ),
}

for name, check in CHECKS.items():
    failure = None
    try:
        check()
    except Exception as error:  # noqa: BLE001 - told, not raised: the next check runs
        failure = f"{type(error).__name__}: {error}"[:200]
    print(json.dumps({"name": name, "error": failure}), flush=True)
