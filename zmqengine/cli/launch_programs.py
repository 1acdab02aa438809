"""Programs that can be pointed at a front-end: one entry for each, with its variables and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

NO_KEY = "none"
"""A placeholder key for front-ends without keys: every program wants one."""


@dataclass(frozen=True)
class LaunchTarget:
    """A front-end and the model to use, which `sees` images or reads text only. `folder` is for settings files of
    programs that read them."""

    url: str
    model: str
    context_tokens: int
    folder: str
    key: str = NO_KEY
    sees: bool = False

    @property
    def inputs(self) -> list[str]:
        """Kinds of input that the model reads."""
        return ["text", "image"] if self.sees else ["text"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a program: environment variables, `arguments`, and contents of `files` by path."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program: its `command`, how to `install` it, the API it speaks, and its setup.

    `context_tokens_min` is the context its own prompt needs, with room to work. `advice` improves the use of the
    prefix cache. `tools`: it works by calling tools.
    """

    title: str
    command: str
    install: str
    api: Literal["messages", "responses", "chat"]
    context_tokens_min: int
    setup: Callable[[LaunchTarget], Setup]
    advice: str
    tools: bool = True


def _claude(front_end: LaunchTarget) -> Setup:
    models = (
        "MODEL",
        "SMALL_FAST_MODEL",
        "DEFAULT_OPUS_MODEL",
        "DEFAULT_SONNET_MODEL",
        "DEFAULT_HAIKU_MODEL",
    )
    settings = {
        "totalTokensReminder": "off",
        # Its default, auto, has each action checked by Anthropic's server, and stops with a dialog at any other;
        # its questions would offer to switch to it.
        "permissions": {"defaultMode": "default", "disableAutoMode": "disable"},
    }
    return Setup(
        environment={
            "ANTHROPIC_BASE_URL": front_end.url,
            "ANTHROPIC_AUTH_TOKEN": front_end.key,
            **{f"ANTHROPIC_{name}": front_end.model for name in models},
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            # It takes a model that it does not know to have a million tokens, and warns of that at each start.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(front_end.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max(1024, min(32_000, front_end.context_tokens // 4))),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        arguments=("--settings", json.dumps(settings)),
    )


def _codex(front_end: LaunchTarget) -> Setup:
    catalog = f"{front_end.folder}/codex-models.json"
    provider = {"name": "zmqengine", "base_url": f"{front_end.url}/v1", "wire_api": "responses"}
    if front_end.key != NO_KEY:
        provider["env_key"] = "ZMQENGINE_API_KEY"
    options = {
        "model": front_end.model,
        "model_provider": "zmqengine",
        **{f"model_providers.zmqengine.{name}": value for name, value in provider.items()},
        "model_catalog_json": catalog,
    }
    return Setup(
        environment={} if front_end.key == NO_KEY else {"ZMQENGINE_API_KEY": front_end.key},
        arguments=[part for name, value in options.items() for part in ("-c", f"{name}={json.dumps(value)}")],
        files={catalog: f"{front_end.url}/v1/models?client_version=1"},
    )


def _opencode(front_end: LaunchTarget) -> Setup:
    limit = {"context": front_end.context_tokens, "output": min(32_000, front_end.context_tokens // 4)}
    model = {
        "name": front_end.model,
        "tool_call": True,
        "attachment": front_end.sees,
        "modalities": {"input": front_end.inputs, "output": ["text"]},
        "limit": limit,
    }
    config = {
        "model": f"zmqengine/{front_end.model}",
        "small_model": f"zmqengine/{front_end.model}",
        "provider": {
            "zmqengine": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "zmqengine",
                "options": {"baseURL": f"{front_end.url}/v1", "apiKey": front_end.key},
                "models": {front_end.model: model},
            }
        },
    }
    return Setup(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen_code(front_end: LaunchTarget) -> Setup:
    return Setup(
        environment={
            "OPENAI_BASE_URL": f"{front_end.url}/v1",
            "OPENAI_API_KEY": front_end.key,
            "OPENAI_MODEL": front_end.model,
        },
        arguments=("--auth-type", "openai"),
    )


def _pi(front_end: LaunchTarget) -> Setup:
    model = {
        "id": front_end.model,
        "reasoning": True,
        "input": front_end.inputs,
        "contextWindow": front_end.context_tokens,
    }
    provider = {
        "baseUrl": f"{front_end.url}/v1",
        "api": "openai-responses",
        "apiKey": front_end.key,
        "models": [model],
    }
    return Setup(
        environment={"PI_CODING_AGENT_DIR": f"{front_end.folder}/pi"},
        arguments=("--provider", "zmqengine", "--model", front_end.model),
        files={
            f"{front_end.folder}/pi/models.json": json.dumps({"providers": {"zmqengine": provider}}, indent=2)
        },
    )


def _llm(front_end: LaunchTarget) -> Setup:
    model = {"model_id": "zmqengine", "model_name": front_end.model, "api_base": f"{front_end.url}/v1"}
    if front_end.sees:
        model["vision"] = "true"
    entry = "".join(f"{'- ' if index == 0 else '  '}{k}: {v}\n" for index, (k, v) in enumerate(model.items()))
    return Setup(
        environment={"LLM_USER_PATH": f"{front_end.folder}/llm", "OPENAI_API_KEY": front_end.key},
        arguments=("-m", "zmqengine"),
        files={f"{front_end.folder}/llm/extra-openai-models.yaml": entry},
    )


def _copilot(front_end: LaunchTarget) -> Setup:
    return Setup(
        environment={
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_BASE_URL": f"{front_end.url}/v1",
            "COPILOT_PROVIDER_API_KEY": front_end.key,
            "COPILOT_MODEL": front_end.model,
        }
    )


def _aider(front_end: LaunchTarget) -> Setup:
    facts = f"{front_end.folder}/aider-models.json"
    name = f"openai/{front_end.model}"
    window = {
        "max_input_tokens": front_end.context_tokens,
        "max_output_tokens": front_end.context_tokens // 4,
        "litellm_provider": "openai",
        "mode": "chat",
        "supports_vision": front_end.sees,
    }
    return Setup(
        environment={"OPENAI_API_BASE": f"{front_end.url}/v1", "OPENAI_API_KEY": front_end.key},
        arguments=("--model", name, "--model-metadata-file", facts),
        files={facts: json.dumps({name: window}, indent=2)},
    )


def _continue(front_end: LaunchTarget) -> Setup:
    path = f"{front_end.folder}/continue.yaml"
    model: dict[str, object] = {
        "name": front_end.model,
        "provider": "openai",
        "model": front_end.model,
        "apiBase": f"{front_end.url}/v1",
        "apiKey": front_end.key,
        "capabilities": ["tool_use", *(["image_input"] if front_end.sees else [])],
        "defaultCompletionOptions": {"contextLength": front_end.context_tokens},
        "roles": ["chat", "edit", "apply"],
    }
    # JSON is YAML.
    config = {"name": "zmqengine", "version": "1.0.0", "schema": "v1", "models": [model]}
    return Setup(arguments=("--config", path), files={path: json.dumps(config, indent=2)})


def _cline(front_end: LaunchTarget) -> Setup:
    folder = f"{front_end.folder}/cline"
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": front_end.key,
        "model": front_end.model,
        "baseUrl": f"{front_end.url}/v1",
    }
    # As `cline auth` writes it.
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    config = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: entry}}
    return Setup(
        arguments=("--config", folder),
        files={f"{folder}/data/settings/providers.json": json.dumps(config, indent=2)},
    )


def _crush(front_end: LaunchTarget) -> Setup:
    model = {
        "id": front_end.model,
        "name": front_end.model,
        "context_window": front_end.context_tokens,
        "default_max_tokens": min(32_000, front_end.context_tokens // 4),
        "supports_attachments": front_end.sees,
    }
    provider = {
        "name": "zmqengine",
        "type": "openai-compat",
        "base_url": f"{front_end.url}/v1",
        "api_key": front_end.key,
        "models": [model],
    }
    chosen = {"provider": "zmqengine", "model": front_end.model}
    config = {"providers": {"zmqengine": provider}, "models": {"large": chosen, "small": chosen}}
    return Setup(
        environment={"CRUSH_GLOBAL_CONFIG": f"{front_end.folder}/crush"},
        files={f"{front_end.folder}/crush/crush.json": json.dumps(config, indent=2)},
    )


def _goose(front_end: LaunchTarget) -> Setup:
    return Setup(
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": front_end.model,
            "GOOSE_CONTEXT_LIMIT": str(front_end.context_tokens),
            "OPENAI_HOST": front_end.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": front_end.key,
        }
    )


PROGRAMS: Mapping[str, Program] = {
    "claude": Program(
        title="Claude Code",
        command="claude",
        install="npm install -g @anthropic-ai/claude-code",
        api="messages",
        context_tokens_min=40_000,
        setup=_claude,
        advice="CLAUDE_CODE_ATTRIBUTION_HEADER=0 and totalTokensReminder off keep the head of the prompt the same; "
        "the front-end removes both too. Fewer MCP servers make a shorter head.",
    ),
    "codex": Program(
        title="Codex",
        command="codex",
        install="npm install -g @openai/codex",
        api="responses",
        context_tokens_min=12_000,
        setup=_codex,
        advice="Codex names its session in each request, so it stays with one worker. Another approval mode or folder "
        "in a session adds to the prompt and does not change its head.",
    ),
    "opencode": Program(
        title="opencode",
        command="opencode",
        install="npm install -g opencode-ai",
        api="chat",
        context_tokens_min=20_000,
        setup=_opencode,
        advice="The title of a session is a request of its own, beside the first turn. Keep one agent for a "
        "session: each has another head.",
    ),
    "qwen-code": Program(
        title="Qwen Code",
        command="qwen",
        install="npm install -g @qwen-code/qwen-code",
        api="chat",
        context_tokens_min=32_000,
        setup=_qwen_code,
        advice="The listing of the folder is part of the first message: it is fixed when a session starts.",
    ),
    "pi": Program(
        title="pi",
        command="pi",
        install="npm install -g @mariozechner/pi-coding-agent",
        api="responses",
        context_tokens_min=8_000,
        setup=_pi,
        advice="Its head is short and does not change. PI_CODING_AGENT_DIR stands for your own settings: to keep "
        "those, copy the provider into ~/.pi/agent/models.json instead.",
    ),
    "copilot": Program(
        title="GitHub Copilot CLI",
        command="copilot",
        install="npm install -g @github/copilot",
        api="chat",
        context_tokens_min=32_000,
        setup=_copilot,
        advice="Its head does not change in a session; other tools or MCP servers make another one.",
    ),
    "aider": Program(
        title="aider",
        command="aider",
        install="pip install aider-chat",
        api="chat",
        context_tokens_min=8_000,
        setup=_aider,
        tools=False,
        advice="/add puts a file into the middle of the prompt: what stands before it is found again.",
    ),
    "continue": Program(
        title="Continue",
        command="cn",
        install="npm install -g @continuedev/cli",
        api="chat",
        context_tokens_min=8_000,
        setup=_continue,
        advice="Its head is short and does not change in a session.",
    ),
    "cline": Program(
        title="Cline",
        command="cline",
        install="npm install -g cline",
        api="chat",
        context_tokens_min=16_000,
        setup=_cline,
        advice="Its head does not change in a session. --config stands for your own settings and sessions: to keep "
        "those, run `cline auth -p openai-compatible` instead.",
    ),
    "crush": Program(
        title="Crush",
        command="crush",
        install="npm install -g @charmland/crush",
        api="chat",
        context_tokens_min=20_000,
        setup=_crush,
        advice="The title of a session is a request of its own. Fewer MCP servers and LSPs make a shorter head.",
    ),
    "goose": Program(
        title="goose",
        command="goose",
        install="npm install -g @aaif/goose",
        api="chat",
        context_tokens_min=12_000,
        setup=_goose,
        advice="Fewer extensions make a shorter head; enabling one in a session changes it.",
    ),
    "llm": Program(
        title="llm",
        command="llm",
        install="pip install llm",
        api="chat",
        context_tokens_min=1_000,
        setup=_llm,
        tools=False,
        advice="`llm -c` goes on with the last conversation, whose beginning is in the cache.",
    ),
}
