"""Deferred tools: definitions that enter the prompt where a search found them.

A tool with `defer_loading` stays out of the head of the prompt, so that finding it leaves the head, and the prefix
cache with it, as they were. The client's search tool returns `tool_reference` blocks, and the definition is
rendered in place of the first one. Source:
https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/tool-search-tool
"""

from __future__ import annotations

import json

from zmqengine_http.apis.anthropic.request import AnthropicTool, Block, CountRequest
from zmqengine_http.stable_head.head import sort_tools

_SERVER_SEARCH = "tool_search_tool"
"""The types of Anthropic's own search tools begin so. This server does not run them, so nothing would ever load
the deferred tools."""


class DeferredTools:
    """The tools of one request. Once `text` was called for its references, `offered` and `loaded` are complete."""

    def __init__(self, request: CountRequest) -> None:
        custom = [tool for tool in request.tools if tool.type in (None, "custom")]
        searched_by_server = any((tool.type or "").startswith(_SERVER_SEARCH) for tool in request.tools)
        forced = request.tool_choice.name if request.tool_choice else None
        waiting = [tool for tool in custom if tool.defer_loading and tool.name != forced]
        if searched_by_server or len(waiting) == len(custom):
            # Nothing could load them: they are offered in the head.
            waiting = []
        self._own = custom
        self._waiting = {tool.name: tool for tool in waiting}
        self._head = {tool.name for tool in custom} - self._waiting.keys()
        self.loaded: list[str] = []
        """Names of the deferred tools that the messages define."""

    @property
    def offered(self) -> list[dict[str, object]]:
        """The client's tools that the model may call, in OpenAI's form: those of the head and those loaded."""
        known = self._head | set(self.loaded)
        return [template_tool(tool) for tool in self._own if tool.name in known]

    def text(self, block: Block) -> str:
        """The text of a `tool_reference`: the definition at the first reference, then the name."""
        name = block.tool_name or ""
        if name in self.loaded or name in self._head:
            return f"The tool {name} is available."
        tool = self._waiting.get(name)
        if tool is None:
            return f"The tool {name[:200]} is not available."
        self.loaded.append(name)
        (ordered,), _ = sort_tools([template_tool(tool)])
        definition = json.dumps(ordered, ensure_ascii=False)
        return f"The tool {name} is available now, like those above:\n<tools>\n{definition}\n</tools>"


def template_tool(tool: AnthropicTool) -> dict[str, object]:
    """A tool of the client in OpenAI's form, which chat templates read."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
