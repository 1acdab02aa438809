"""Tools as a chat offers them, and the calls that a chat makes."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool. `kind` is a type of JSON Schema; `choices` is its enum, if it has one."""

    name: str
    kind: str
    description: str = ""
    choices: tuple[str, ...] = ()
    required: bool = True

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        schema: dict[str, Any] = {"type": self.kind}
        if self.description:
            schema["description"] = self.description
        if self.choices:
            schema["enum"] = list(self.choices)
        return schema

    @property
    def text(self) -> str:
        """What the chat template makes of the schema."""
        mark = "" if self.required else "?"
        kind = "|".join(self.choices) or self.kind
        note = f" ({self.description})" if self.description else ""
        return f"{self.name}{mark}: {kind}{note}"


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as OpenAI's API and chat templates take it."""
        schema = {
            "type": "object",
            "properties": {parameter.name: parameter.schema for parameter in self.parameters},
            "required": [parameter.name for parameter in self.parameters if parameter.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    @property
    def text(self) -> str:
        """What the chat template makes of the definition: a comment, and the signature below it."""
        comment = f"# {self.description}\n" if self.description else ""
        return f"{comment}{self.name}({', '.join(parameter.text for parameter in self.parameters)})\n"

    @property
    def key(self) -> str:
        """What decides the split: no tool of one side has the name and the parameters of one of the other."""
        return f"tool/{self.name}/{'/'.join(parameter.name for parameter in self.parameters)}"


@dataclass(frozen=True)
class ToolCall:
    """A call, with its `arguments` as JSON, and the `answer` of the tool."""

    name: str
    arguments: str
    answer: str

    @property
    def text(self) -> str:
        """What the model says to make the call."""
        return (
            f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": {self.arguments}}}\n</tool_call>'
        )

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message of a chat."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
