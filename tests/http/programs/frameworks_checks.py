"""Frameworks on a front-end: plain answers, streams and a tool loop of each that is installed.

python frameworks_checks.py URL MODEL
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1:]
ASK = "What time is it in Seville?"
TOKENS = 60


def current_time(city: str) -> str:
    """Tells what time it is."""
    return "noon"


def check(name: str, run: Callable[..., Any], *arguments: Any) -> None:
    """Print the result of a check as a line of JSON: it has to say something."""
    try:
        error = "" if run(*arguments) else "it said nothing"
    except Exception as problem:  # noqa: BLE001 - each is a line of the table
        error = repr(problem)
    print(json.dumps({"name": name, "error": error}), flush=True)


def langchain() -> None:
    """Chats and tools by both of OpenAI's APIs and Anthropic's, and an agent of langgraph."""
    openai, anthropic, langgraph = map(
        importlib.import_module, ("langchain_openai", "langchain_anthropic", "langgraph.prebuilt")
    )
    own = {"api_key": "-", "model": MODEL, "max_tokens": TOKENS, "temperature": 0}
    models = {
        "chat": openai.ChatOpenAI(base_url=f"{URL}/v1", **own),
        "responses": openai.ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **own),
        "anthropic": anthropic.ChatAnthropic(
            base_url=URL,
            api_key="-",
            model=MODEL,
            max_tokens=TOKENS,
            model_kwargs={
                "extra_body": {"temperature": 0}
            },  # Anthropic's client has no argument for it any more.
        ),
    }
    tool = importlib.import_module("langchain_core.tools").tool(current_time)
    for name, model in models.items():
        check(f"langchain {name}", lambda model: model.invoke("Hello").content, model)
        check(f"langchain {name}, streamed", lambda model: list(model.stream("Hello")), model)
        check(f"langchain {name}, batch", lambda model: model.batch(["Hello", "Hi"]), model)
        check(
            f"langchain {name}, tools", lambda model: model.bind_tools([tool]).invoke(ASK).tool_calls, model
        )
    agent = langgraph.create_react_agent(models["chat"], [tool])
    check("langgraph agent", lambda: len(agent.invoke({"messages": [("human", ASK)]})["messages"]) == 4)


def pydantic_ai() -> None:
    """Its three ways to a model."""
    ai = importlib.import_module("pydantic_ai")
    kinds = (
        ("openai", "OpenAIChatModel", "/v1"),
        ("openai", "OpenAIResponsesModel", "/v1"),
        ("anthropic", "AnthropicModel", ""),
    )
    for module, kind, path in kinds:
        provider = getattr(
            importlib.import_module(f"pydantic_ai.providers.{module}"),
            {"openai": "OpenAIProvider", "anthropic": "AnthropicProvider"}[module],
        )(base_url=URL + path, api_key="-")
        model = getattr(importlib.import_module(f"pydantic_ai.models.{module}"), kind)(
            MODEL, provider=provider
        )
        for name, tools in (("", []), (", tool", [current_time])):
            agent = ai.Agent(model, tools=tools, model_settings={"max_tokens": TOKENS})
            check(f"pydantic-ai {kind}{name}", lambda agent: agent.run_sync(ASK).output, agent)


def openai_agents() -> None:
    """Both of its models, with a tool."""
    agents, openai = importlib.import_module("agents"), importlib.import_module("openai")
    agents.set_tracing_disabled(True)
    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-")
        agent = agents.Agent(
            name="a", model=getattr(agents, kind)(model=MODEL, openai_client=client),
            model_settings=agents.ModelSettings(max_tokens=TOKENS, temperature=0),
            tools=[agents.function_tool(current_time)],
        )  # fmt: skip
        check(
            f"openai-agents {kind}",
            lambda agent: asyncio.run(agents.Runner.run(agent, ASK)).final_output,
            agent,
        )


def smolagents() -> None:
    """Its model for servers of OpenAI's API."""
    module = importlib.import_module("smolagents")
    model = module.OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="-", max_tokens=TOKENS)
    said = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    check("smolagents", lambda: model(said).content)


def llama_index() -> None:
    """Chats, streams and completions."""
    like = importlib.import_module("llama_index.llms.openai_like").OpenAILike
    message = importlib.import_module("llama_index.core.llms").ChatMessage(role="user", content="Hello")
    own = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "-", "max_tokens": TOKENS}
    chat, text = like(is_chat_model=True, **own), like(is_chat_model=False, **own)
    check("llama-index chat", lambda: str(chat.chat([message])))
    check("llama-index chat, streamed", lambda: list(chat.stream_chat([message])))
    check("llama-index completion", lambda: str(text.complete("Once upon")))


def dspy() -> None:
    """A prompt and messages; a field that is held to its values by a JSON schema."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    module = importlib.import_module("dspy")
    model = module.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="-", max_tokens=TOKENS, cache=False)
    check("dspy prompt", lambda: model("Hello"))
    check("dspy messages", lambda: model(messages=[{"role": "user", "content": "Hello"}]))
    model.kwargs["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": ["glad", "sad"]}, "strict": True},
    }
    check("dspy, schema", lambda: str(model("Tell me about Tom.")[0]).strip('"') in ("glad", "sad"))


if __name__ == "__main__":
    for framework in (langchain, pydantic_ai, openai_agents, smolagents, llama_index, dspy):
        try:
            framework()
        except ModuleNotFoundError as missing:
            print(f"not installed: {missing.name}", file=sys.stderr)
