"""The tools of a Responses request: flattened to functions for chat templates, and their original names.

A namespace, in which Codex groups the tools of an MCP server, becomes functions prefixed with its name. A
freeform tool becomes a function with one string argument. Server-side tools are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from zmqengine_http.apis.openai_api.freeform import FREEFORM, freeform_description
from zmqengine_http.apis.responses.request import ResponsesTool
from zmqengine_http.serving.errors import ApiError, bad_field

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class ToolName(NamedTuple):
    """The client's name and namespace of a tool, and its kind."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom"] = "function"


class ToolBook:
    """The tools of one request: `plain` for the template, `find` for the names of calls, `skipped` types."""

    def __init__(self, tools: Sequence[ResponsesTool]) -> None:
        self.plain: list[dict[str, object]] = []
        self.skipped: list[str] = []
        self._names: dict[str, ToolName] = {}
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]", None)

    def find(self, flat: str) -> ToolName:
        """The client's name of the tool that the model calls `flat`."""
        return self._names.get(flat) or ToolName(flat)

    def keep(self, names: Sequence[str]) -> None:
        """Keep only these tools, as `allowed_tools` demands."""
        kept = {flat for flat, tool in self._names.items() if tool.name in names or flat in names}
        self.plain = [tool for tool in self.plain if _flat_of(tool) in kept]

    def _add(self, tool: ResponsesTool, where: str, namespace: str | None) -> None:
        if tool.type == "namespace" and tool.name and namespace is None:
            for index, inner in enumerate(tool.tools or []):
                try:
                    converted = msgspec.convert(inner, ResponsesTool)
                except msgspec.ValidationError as error:
                    raise bad_field(f"{where}.tools[{index}]", str(error).partition(" - at")[0]) from None
                self._add(converted, f"{where}.tools[{index}]", tool.name)
            return
        if tool.type == "function":
            parameters = tool.parameters or {"type": "object", "properties": {}}
            self._offer(tool, where, ToolName(tool.name or "", namespace), tool.description, parameters)
        elif tool.type == "custom":
            name = ToolName(tool.name or "", namespace, "custom")
            self._offer(tool, where, name, freeform_description(tool.description, tool.format), FREEFORM)
        else:
            self.skipped.append(tool.type)

    def _offer(
        self,
        tool: ResponsesTool,
        where: str,
        name: ToolName,
        description: str | None,
        parameters: dict[str, object],
    ) -> None:
        flat = flat_name(name.name, name.namespace)
        if not _NAME.fullmatch(flat):
            raise bad_field(f"{where}.name", f"{flat[:140]!r} is not the name of a function")
        function: dict[str, object] = {"name": flat}
        if description:
            function["description"] = description
        function["parameters"] = parameters
        if tool.strict:
            function["strict"] = True
        self._names[flat] = name
        self.plain.append({"type": "function", "function": function})


def flat_name(name: str, namespace: str | None) -> str:
    """The tool's name in the prompt and the output: `mcp__files` and `read` become `mcp__files__read`."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def tool_choice(choice: str | dict[str, object], book: ToolBook) -> str | dict[str, object]:
    """The tool choice in the form of chat completions; `allowed_tools` narrows the book. Raises a 400
    otherwise."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        names = (
            [str(tool.get("name")) for tool in allowed if isinstance(tool, dict)]
            if isinstance(allowed, list)
            else []
        )
        book.keep(names)
        return str(choice.get("mode", "auto"))
    if kind in ("function", "custom") and isinstance(choice.get("name"), str):
        namespace = choice.get("namespace")
        flat = flat_name(str(choice["name"]), str(namespace) if namespace else None)
        return {"type": "function", "function": {"name": flat}}
    raise ApiError(
        400,
        f"tool_choice: {str(kind)[:40]!r} is not a tool of this server",
        param="tool_choice",
        code="unsupported_value",
    )


def _flat_of(tool: dict[str, object]) -> str:
    function = tool["function"]
    return str(function["name"]) if isinstance(function, dict) else ""
