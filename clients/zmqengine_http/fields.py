"""Every request field we know, and what becomes of it: the one table behind the parser, the README and the tests.

supported: honoured, or a 400 that says why not. refused: a 400 that names it, unless it has a neutral value, which
asks for nothing. ignored: accepted and without effect, because it changes nothing of the answer. Any other field is
a 400 that names it. A null is always the same as leaving the field out.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from zmqengine_http.errors import ApiError

Endpoint = Literal["chat", "completions"]
Fate = Literal["supported", "refused", "ignored"]
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
TEXT: tuple[Endpoint, ...] = ("completions",)


class Field(NamedTuple):
    """One request field. `neutral` holds the values of a refused field that ask for nothing."""

    name: str
    endpoints: tuple[Endpoint, ...]
    fate: Fate
    note: str
    neutral: tuple[object, ...] = ()


FIELDS: tuple[Field, ...] = (
    Field(
        "model",
        BOTH,
        "supported",
        "the name of a worker's model, or an alias; may be left out if there is one model",
    ),
    Field("messages", CHAT, "supported", "text only; roles system, developer, user, assistant, tool"),
    Field("prompt", TEXT, "supported", "a string, token ids, or a list of either"),
    Field(
        "max_tokens", BOTH, "supported", "chat: what the context leaves; completions: 16, as OpenAI has it"
    ),
    Field("max_completion_tokens", CHAT, "supported", "the newer name of max_tokens"),
    Field("temperature", BOTH, "supported", "0 to 2; default 1, or `default_temperature`"),
    Field("top_p", BOTH, "supported", "0 to 1"),
    Field("top_k", BOTH, "supported", "an extension; 0 and -1 turn it off"),
    Field("min_p", BOTH, "supported", "an extension"),
    Field("repetition_penalty", BOTH, "supported", "an extension"),
    Field("presence_penalty", BOTH, "supported", "-2 to 2"),
    Field("frequency_penalty", BOTH, "supported", "-2 to 2"),
    Field("logit_bias", BOTH, "supported", "token id to -100..100; ids outside the vocabulary are a 400"),
    Field("seed", BOTH, "supported", "64 bits; choice i of n uses seed + i"),
    Field("stop", BOTH, "supported", "a string or up to 16; never in the output"),
    Field("stop_token_ids", BOTH, "supported", "an extension"),
    Field("ignore_eos", BOTH, "supported", "an extension: the model's end tokens do not end the output"),
    Field("n", BOTH, "supported", "as many requests to the worker; up to `choices_max` in all"),
    Field("stream", BOTH, "supported", "server-sent events, one or more tokens each"),
    Field("stream_options", BOTH, "supported", "include_usage; include_obfuscation is ignored"),
    Field("logprobs", BOTH, "supported", "chat: a flag; completions: a number up to 20"),
    Field("top_logprobs", CHAT, "supported", "up to 20, with logprobs"),
    Field("tools", CHAT, "supported", "functions, in the model's own format; strict schemas are refused"),
    Field("tool_choice", CHAT, "supported", "none and auto; required and a named function are refused"),
    Field("parallel_tool_calls", CHAT, "supported", "false: the answer ends after the first call"),
    Field("response_format", CHAT, "supported", "text; the JSON ones are refused"),
    Field("reasoning_effort", CHAT, "supported", "where the model's chat template knows it, else refused"),
    Field("chat_template_kwargs", CHAT, "supported", "an extension: variables for the chat template"),
    Field("priority", BOTH, "supported", "an extension: -100 to 100, the lower is served first"),
    Field(
        "deadline_ms",
        BOTH,
        "supported",
        "an extension: the answer is a 504, or an error event, after this time",
    ),
    Field("echo", TEXT, "refused", "", (False,)),
    Field("suffix", TEXT, "refused", "", ("",)),
    Field("best_of", TEXT, "refused", "use n", (1,)),
    Field("functions", CHAT, "refused", "use tools", ([],)),
    Field("function_call", CHAT, "refused", "use tool_choice", ("none", "auto")),
    Field("modalities", CHAT, "refused", "text only", (["text"],)),
    Field("audio", CHAT, "refused", "text only"),
    Field("prediction", CHAT, "refused", ""),
    Field("web_search_options", CHAT, "refused", ""),
    Field("moderation", CHAT, "refused", ""),
    Field("verbosity", CHAT, "refused", "", ("medium",)),
    Field("guided_json", BOTH, "refused", "no constrained output yet"),
    Field("guided_regex", BOTH, "refused", "no constrained output yet"),
    Field("guided_choice", BOTH, "refused", "no constrained output yet"),
    Field("guided_grammar", BOTH, "refused", "no constrained output yet"),
    Field("structured_outputs", BOTH, "refused", "no constrained output yet"),
    Field("min_tokens", BOTH, "refused", "", (0,)),
    Field(
        "prompt_cache_key",
        BOTH,
        "supported",
        "requests of one key go to one worker, where its prompt cache is",
    ),
    Field("user", BOTH, "ignored", "for the caller's own records"),
    Field("safety_identifier", BOTH, "ignored", "for the caller's own records"),
    Field("metadata", BOTH, "ignored", "for the caller's own records"),
    Field("store", BOTH, "ignored", "nothing is stored"),
    Field("service_tier", BOTH, "ignored", "there is one tier"),
    Field("prompt_cache_retention", BOTH, "ignored", "the worker decides"),
    Field("prompt_cache_options", BOTH, "ignored", "the worker decides"),
)

_BY_ENDPOINT: dict[Endpoint, dict[str, Field]] = {
    endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints} for endpoint in BOTH
}


def supported_names(endpoint: Endpoint) -> list[str]:
    """The fields that the request struct of this endpoint has."""
    return [name for name, field in _BY_ENDPOINT[endpoint].items() if field.fate == "supported"]


def accept(endpoint: Endpoint, body: dict[str, object]) -> dict[str, object]:
    """The supported fields of a body that are not null. Raises a 400 that names the first field it cannot take."""
    known = _BY_ENDPOINT[endpoint]
    accepted: dict[str, object] = {}
    for name, value in body.items():
        field = known.get(name)
        if field is None:
            shown = name if name.isprintable() and len(name) <= 100 else repr(name[:100])
            raise ApiError(
                400, f"Unrecognized request argument supplied: {shown}", param=shown, code="unknown_parameter"
            )
        if value is None or field.fate == "ignored":
            continue
        if field.fate == "supported":
            accepted[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in field.neutral):
            hint = f": {field.note}" if field.note else ""
            raise ApiError(
                400, f"{name} is not supported by this server{hint}", param=name, code="unsupported_parameter"
            )
    return accepted


def markdown_table() -> str:
    """The table of the README: `python -m zmqengine_http.fields` prints it."""
    lines = ["| | `/v1/chat/completions` | `/v1/completions` |", "|---|---|---|"]
    titles: tuple[tuple[Fate, str], ...] = (
        ("supported", "supported: honoured, or a 400 that says why not"),
        ("refused", "refused: a 400 that names it"),
        ("ignored", "ignored: changes nothing of the answer"),
    )
    for fate, title in titles:
        cells = [
            ", ".join(
                f"`{field.name}`" for field in FIELDS if field.fate == fate and endpoint in field.endpoints
            )
            for endpoint in BOTH
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown_table(), end="")
