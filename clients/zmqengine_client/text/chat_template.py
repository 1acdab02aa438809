"""Chat templates in the Jinja dialect that models on the hub are published with.

The template comes with the model, so it is untrusted: it runs in a sandbox, sees plain data only, and cannot modify
its input.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zmqengine.errors import BadRequest


class ChatTemplate:
    """One compiled template, the names of the `variables` it reads, and the texts it has `compared` something with.

    Raises `BadRequest` when the template cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            # First: the search for variables folds lists of texts.
            self.compared = _compared(parsed)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        except jinja2.TemplateError as error:
            raise BadRequest(f"the model's chat template is broken: {error}") from None
        # Copied for every rendering: of Jinja's own chain of maps that is a third of the time.
        self._template.globals = dict(self._template.globals)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt for these messages. Raises `BadRequest` with the template's error."""
        plain = [_plain(message) for message in messages]
        if not all(isinstance(message, dict) for message in plain):
            raise BadRequest("messages must be mappings with a role and a content")
        plain = [self._shaped(message) for message in plain]
        try:
            return self._template.render(
                messages=plain, **{name: _plain(value) for name, value in variables.items()}
            )
        except _REFUSALS as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from None

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with a content of text alone in the form that the template writes out: one text, or parts."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": _parts(content)} if self._reads_parts_alone else message
        if self._reads_parts_alone or not isinstance(content, list) or not all(map(_is_text, content)):
            return message
        return {**message, "content": "".join(part["text"] for part in content)}

    @functools.cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether the template has no place for a content that is a text, as Idefics3's has none."""
        return not self._writes(_PROBE) and self._writes(_parts(_PROBE))

    def _writes(self, content: object) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            return _PROBE in self._template.render(messages=messages, bos_token="", eos_token="")
        except _REFUSALS:
            return False


# Lists and mappings of texts stand for comparisons: a template may give them a name.
_COMPARING = (
    jinja2.nodes.Compare, jinja2.nodes.Test, jinja2.nodes.List, jinja2.nodes.Tuple, jinja2.nodes.Dict,
)  # fmt: skip


def _compared(template: jinja2.nodes.Template) -> frozenset[str]:
    """The texts in comparisons of a template; its prose is not among them."""
    constants = (text for node in template.find_all(_COMPARING) for text in node.find_all(jinja2.nodes.Const))
    return frozenset(text.value for text in constants if isinstance(text.value, str))


_PROBE = "probe"
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's part for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model was never trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain(value: Any) -> Any:
    """`value` rebuilt from plain types, so that a template reaches no method of the caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise BadRequest(f"a chat template takes plain data, not {type(value).__name__}")
