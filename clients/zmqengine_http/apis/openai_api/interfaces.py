"""Fields that user interfaces and other servers add to OpenAI's requests.

A synonym with one meaning is taken for the field that it names. A field that cannot change the output is ignored,
and named in a header of the response. A field that would change the output in a way that this server does not
know is refused by name, unless its value changes nothing. Sources: Open WebUI's utils/payload.py, LibreChat's
endpoints/openai/llm.ts, SillyTavern's text completion settings, the server documentation of llama.cpp, vLLM, LM
Studio, OpenRouter, DeepSeek and Ollama.
"""

from __future__ import annotations

from zmqengine_http.serving.body import Field, foreign, reported
from zmqengine_http.serving.errors import bad_field

SYNONYMS = {
    "repeat_penalty": "repetition_penalty",
    "rep_pen": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "stop_sequence": "stop",
    "stopping_strings": "stop",
    "sampler_seed": "seed",
}
_THINKING_BOUNDS = ("thinking_token_budget", "thinking_budget", "reasoning_budget")
"""Names that vLLM, SiliconFlow and llama.cpp have for a bound on the tokens of reasoning."""
_UNBOUNDED = (-1,)
"""vLLM's and llama.cpp's bound on reasoning for none."""
_UNLIMITED = (-1, -2)
"""llama.cpp's and Ollama's values of max_tokens for all that the context leaves."""
_RANDOM_SEED = -1
"""llama.cpp's, vLLM's and SillyTavern's seed for none."""
ALL_THAT_FITS = -1
"""The max_tokens of a completion for all that the context leaves: without one OpenAI's is 16."""


def translate_fields(body: dict[str, object]) -> dict[str, str]:
    """Rename synonyms in a completion request; returns by which name each was sent. Raises a 400 for two names with
    two values."""
    sent = _translate_both(body)
    if body.get("max_tokens") in _UNLIMITED:
        body["max_tokens"] = ALL_THAT_FITS
    return sent


def _translate_both(body: dict[str, object]) -> dict[str, str]:
    sent = {}
    for synonym, name in SYNONYMS.items():
        if synonym in body:
            if body.get(name) is None:
                sent[name] = synonym
            _give(body, name, body.pop(synonym), synonym)
    if body.get("seed") == _RANDOM_SEED:
        del body["seed"]
    return sent


def translate_chat_fields(body: dict[str, object]) -> dict[str, str]:
    """Rename synonyms in a chat request, whose forms of reasoning and JSON schemas differ by server."""
    sent = _translate_both(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) in _UNLIMITED:
            del body[name]
    sent |= _translate_bounds(body)
    for name, effort in _EFFORTS.items():
        if name in body:
            effort_name = effort(name, body.pop(name))
            if effort_name is not None:
                _give(body, "reasoning_effort", effort_name, name)
    format_ = body.get("response_format")
    if isinstance(format_, dict) and isinstance(format_.get("schema"), dict) and "json_schema" not in format_:
        # llama.cpp's, Together's and Fireworks' form.
        named = {"name": "schema", "schema": format_["schema"], "strict": bool(format_.get("strict"))}
        if format_.get("type") in ("json_object", "json_schema"):
            body["response_format"] = {"type": "json_schema", "json_schema": named}
    return sent


def _translate_bounds(body: dict[str, object]) -> dict[str, str]:
    """Rename the bounds on reasoning of other servers; returns the name of the one that was sent."""
    sent = {}
    bounds = {name: body.pop(name) for name in _THINKING_BOUNDS if name in body}
    for name, key in (("thinking", "budget_tokens"), ("reasoning", "max_tokens")):
        switch = body.get(name)
        if isinstance(switch, dict) and switch.get(key) is not None and switch.get("type") != "disabled":
            bounds[f"{name}.{key}"] = switch[key]
    if isinstance(think := body.get("think"), int) and not isinstance(think, bool):
        bounds["think"], body["think"] = think, think != 0
    for name, tokens in bounds.items():
        if tokens is not None and tokens not in _UNBOUNDED:
            _give(body, "thinking_max", tokens, name)
            sent["thinking_max"] = name
    return sent


def _give(body: dict[str, object], name: str, value: object, synonym: str) -> None:
    present = body.get(name)
    if value is None:
        return
    if present is not None and present != value:
        raise bad_field(synonym, f"means {name}, which is given too, with another value: send one of them")
    body[name] = value


def _effort_of_switch(name: str, value: object) -> str | None:
    """The reasoning effort of a switch: true and false, Ollama's levels, DeepSeek's and Anthropic's objects."""
    if isinstance(value, dict):
        kind = value.get("type")
        switches = {"enabled": True, "adaptive": True, "disabled": False}
        value = switches.get(kind) if isinstance(kind, str) else None
        if value is None:
            raise bad_field(f"{name}.type", "one of enabled, adaptive and disabled")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bool):
        return "medium" if value else "none"
    if value is None:
        return None
    raise bad_field(name, "true, false or a level such as low")


def _effort_of_object(name: str, value: object) -> str | None:
    """The reasoning effort of OpenRouter's `reasoning` object."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_field(name, 'an object such as {"effort": "low"}')
    effort = value.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad_field(f"{name}.effort", "a level such as low")
    if effort is None and isinstance(value.get("enabled"), bool):
        return "medium" if value["enabled"] else "none"
    return "medium" if effort is None and value.get("max_tokens") else effort


_EFFORTS = {
    "enable_thinking": _effort_of_switch,
    "thinking": _effort_of_switch,
    "think": _effort_of_switch,
    "reasoning": _effort_of_object,
}
CHAT_SYNONYMS = {
    **SYNONYMS,
    **dict.fromkeys(_THINKING_BOUNDS, "thinking_max"),
    **dict.fromkeys(_EFFORTS, "reasoning_effort"),
}
_NO_MODELS_TO_LOAD = "the worker keeps its model loaded"
_NOT_A_LOCAL_MATTER = "there is one provider, this server"
INTERFACE_FIELDS: tuple[Field, ...] = (
    reported("cache_prompt", "the worker caches what it can"),
    reported("keep_alive", _NO_MODELS_TO_LOAD),
    reported("ttl", _NO_MODELS_TO_LOAD),
    reported("draft_model", "the worker chooses its draft model"),
    reported("id_slot", "the worker chooses its rows"),
    reported("slot_id", "the worker chooses its rows"),
    *(
        reported(name, "the worker's own options decide")
        for name in (
            "num_gpu",
            "num_thread",
            "num_batch",
            "num_keep",
            "n_keep",
            "use_mmap",
            "use_mlock",
            "low_vram",
        )
    ),
    reported("provider", _NOT_A_LOCAL_MATTER),
    reported("models", _NOT_A_LOCAL_MATTER),
    reported("route", _NOT_A_LOCAL_MATTER),
    reported("usage", "the usage is in every response"),
    reported("include_reasoning", "reasoning is a field of its own"),
    reported("reasoning_format", "reasoning is a field of its own"),
    reported("return_progress", "streams have no progress"),
    reported("chat_id", "for the caller's own records"),
    reported("session_id", "for the caller's own records"),
    reported("background_tasks", "for the caller's own records"),
    foreign("mirostat", "", 0),
    *(reported(name, "for mirostat, which is off") for name in ("mirostat_eta", "mirostat_tau")),
    foreign("typical_p", "", 1, 1.0),
    foreign("typical", "", 1, 1.0),
    foreign("tfs_z", "", 1, 1.0),
    foreign("tfs", "", 1, 1.0),
    foreign("top_a", "", 0, 0.0),
    foreign("xtc_probability", "", 0, 0.0),
    reported("xtc_threshold", "for xtc_probability, which is off"),
    foreign("dry_multiplier", "", 0, 0.0),
    *(
        reported(name, "for dry_multiplier, which is off")
        for name in ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
    ),
    foreign("dynatemp_range", "", 0, 0.0),
    reported("dynatemp_exponent", "for dynatemp_range, which is off"),
    foreign("repeat_last_n", "penalties look at the whole text", -1),
    foreign("rep_pen_range", "penalties look at the whole text", 0),
    foreign("grammar", "use guided_grammar, in Lark", ""),
    foreign("skip_special_tokens", "special tokens have no text", True),
    foreign("spaces_between_special_tokens", "special tokens have no text", True, False),
    foreign("include_stop_str_in_output", "", False),
    foreign("truncate_prompt_tokens", "a prompt that is too long is refused", -1),
    foreign("transforms", "a prompt that is too long is refused", []),
)
"""Known fields of neither OpenAI nor vLLM's structured outputs, and the treatment of each."""
