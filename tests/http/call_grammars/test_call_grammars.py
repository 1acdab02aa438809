"""Calls under a grammar, in each format that can be read: walks through it are calls, and their arguments valid."""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
import tokenizers

from tests.support.grammar_walker import GrammarWalker
from tests.support.tool_schemas import TOOLS
from zmqengine.errors import BadRequest
from zmqengine.pico import model_path
from zmqengine.protocol.messages import Limits, ModelCard, TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tool_calls import FORMATS, Delta, make_splitter, schema_types
from zmqengine_client.text.tool_calls.json_formats import BAR, GAP
from zmqengine_http.call_grammars.frames import WITHOUT_GRAMMAR
from zmqengine_http.generating.constraints import OutputConstraint, OutputRules, make_constraint
from zmqengine_http.prompt.prompts import Prompt
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.workers.worker import Model

SEEDS = range(12)
AGENT_SEEDS = int(os.environ.get("ZMQENGINE_TEST_CALL_SEEDS", "2"))
"""Walks for each tool and format; docs/constraints.md counts those of 20."""
HARMONY_MARKERS = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
)
MARKERS: dict[str, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "kimi_k2": tuple(
        f"<|tool_call{word}|>" for word in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
    ),
    "deepseek_v3": tuple(
        f"<{BAR}tool{GAP}{word}{BAR}>"
        for word in (f"calls{GAP}begin", f"calls{GAP}end", f"call{GAP}begin", f"call{GAP}end", "sep")
    ),
    "harmony": HARMONY_MARKERS,
}  # fmt: skip
TEMPLATES = {"harmony": "<|channel|> <|message|>", "deepseek_v3": "```json"}
HINTS = (
    "\n</parameter>", "</parameter>\n", "</parameter>", "</arg_value>", "\n", '<|"|>', "<escape>", "<tool_call>",
    "</tool_call>", '"', "}", ")", "]", "</function>\n", "</invoke>\n",
)  # fmt: skip
WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "at": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["city", "unit", "exact"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {
                "x": {"type": "number"},
                "y": {"type": "number"},
                "on": {"type": ["boolean", "null"]},
            },
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING: Any = {"type": "object", "properties": {}, "additionalProperties": False}
ALIKE = {"laguna", "deepseek_v4"}
"""Formats written like another one but for a marker."""
EVERY = [*(name for name in FORMATS if name not in WITHOUT_GRAMMAR | ALIKE), "harmony"]


def tool(name: str, parameters: Any, *, strict: bool = True) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TWO = [tool("get_weather", WEATHER), tool("get_time", NOTHING)]


class Family:
    """A model that writes calls in one format, its markers tokens or plain text."""

    def __init__(self, name: str, *, special: bool = True, template: str = "") -> None:
        made = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
        markers = () if not special and name != "harmony" else MARKERS.get(name)
        if markers is None:
            markers = tuple(filter(None, (FORMATS[name].start, FORMATS[name].end)))
        made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in markers])
        size = made.get_vocab_size()
        config = json.loads((model_path() / "config.json").read_text())
        eos = config["eos_token_id"]
        self.eos = [eos] if isinstance(eos, int) else list(eos)
        if name == "harmony":
            self.eos = [made.token_to_id("<|call|>"), made.token_to_id("<|return|>")]
        bundle = TokenizerBundle(
            call=0, hash=name, tokenizer_json=made.to_str().encode(), eos_token_ids=self.eos,
            chat_template=template or TEMPLATES.get(name, "tools"),
            facts={} if name == "harmony" else {"tool_parser": name},
        )  # fmt: skip
        self.tokenizer = Tokenizer(bundle)
        limits = Limits(2**24, 4000, 4096, 64, 64, 64, constraints=True)
        self.model = Model(ModelCard(name, size, 4096, self.eos, name, 0), limits, self.tokenizer)
        hints = [
            tokens
            for hint in (*HINTS, "<|end|>" if name == "harmony" else "")
            for tokens in (self.encode(hint), self.encode(hint[:1]) + self.encode(hint[1:]))
        ]
        self.walker = GrammarWalker(bundle.tokenizer_json, size, self.eos, list(filter(None, hints)))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def hold(self, tools: Sequence[Any] = TWO, **wishes: Any) -> OutputConstraint:
        asked: dict[str, Any] = {
            "tools": tools, "tool_choice": "required", "parallel": True, "response_format": {}, **wishes
        }  # fmt: skip
        return make_constraint(self.model, Prompt([1]), OutputRules(**asked))

    def walks(self, held: OutputConstraint, seeds: Sequence[int] = SEEDS) -> list[str]:
        """Texts of the outputs that ended."""
        assert held.constraint is not None
        grammar = self.walker.compile_text(held.constraint.kind, held.constraint.text)
        return [
            self.tokenizer.decode([id_ for id_ in tokens if id_ not in self.eos], skip_special_tokens=False)
            for tokens in self.walker.walk_tokens(grammar, seeds)
        ]

    def allows(self, held: OutputConstraint, text: str) -> bool:
        assert held.constraint is not None
        grammar = self.walker.compile_text(held.constraint.kind, held.constraint.text)
        return self.walker.allows_tokens(grammar, self.encode(text))

    def read(self, text: str, tools: Sequence[Any] = TWO) -> tuple[str, list[tuple[str, Any]]]:
        """Content and calls, as the front-end tells them."""
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
        splitter = make_splitter(self.model.markers, reasoning_open=False, tools=schemas)
        assert splitter is not None
        return joined(splitter.feed(text) + splitter.finish())


@functools.cache
def family_of(name: str, *, special: bool = True, template: str = "") -> Family:
    """A `Family`; its vocabulary takes longer to build than most tests."""
    return Family(name, special=special, template=template)


def joined(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, Any]]]:
    names = [delta.name for delta in deltas if delta.kind in ("call", "call_start")]
    texts: list[str] = []
    for delta in deltas:
        if delta.kind in ("call", "call_start"):
            texts.append("")
        if delta.kind in ("call", "call_text"):
            texts[-1] += delta.text
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    return content, [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def check(calls: Sequence[tuple[str, Any]], tools: Sequence[Any]) -> None:
    schemas: Mapping[str, Any] = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", EVERY)
def test_a_forced_call_is_read_back_and_valid(name: str, special: bool) -> None:
    """Any of two, or several; whether the format's markers are tokens of the model or plain text."""
    family = family_of(name, special=special)
    texts = family.walks(family.hold())
    assert len(texts) >= 3
    for text in texts:
        content, calls = family.read(text)
        assert (content, bool(calls)) == ("", True), text
        check(calls, TWO)


@pytest.mark.parametrize("name", EVERY)
def test_a_named_tool_is_called_once(name: str) -> None:
    """And no other."""
    family = family_of(name)
    for text in family.walks(family.hold(tool_choice={"type": "function", "function": {"name": "get_time"}})):
        assert family.read(text)[1] == [("get_time", {})]


@pytest.mark.parametrize("name", EVERY)
def test_a_strict_tool_leaves_text_free_and_holds_calls(name: str) -> None:
    """With `auto`: text alone is allowed, calls are valid, and none is in disguise."""
    family = family_of(name)
    held = family.hold(tool_choice="auto")
    hello = "Hello, you <there"
    if name == "harmony":
        hello = f"<|channel|>final<|message|>{hello}"
    assert family.allows(held, hello)
    for text in family.walks(held):
        check(family.read(text)[1], TWO)
    plain = [tool("get_time", NOTHING, strict=False)]
    assert family.hold(plain, tool_choice="auto").constraint is None
    assert family.hold(plain, tool_choice="auto", every_call=True).constraint is not None


DSML = (
    f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="get_weather">\n'
    f'<{BAR}DSML{BAR}parameter name="city" string="true">Prag</{BAR}DSML{BAR}parameter>\n'
    f'<{BAR}DSML{BAR}parameter name="unit" string="true">celsius</{BAR}DSML{BAR}parameter>\n'
    f'<{BAR}DSML{BAR}parameter name="days" string="false">3</{BAR}DSML{BAR}parameter>\n'
    f'<{BAR}DSML{BAR}parameter name="exact" string="false">true</{BAR}DSML{BAR}parameter>\n'
    f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>"
)
CANONICAL = {
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": @@}\n</tool_call>',
    "longcat": '<longcat_tool_call>\n{"name": "get_weather", "arguments": @@}\n</longcat_tool_call>',
    "json_list": '<tool_calls>[\n    {"name": "get_weather", "arguments": @@}\n]</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": @@}]</TOOLCALL>',
    "phi4_mini": '<|tool_call|>[{"name": "get_weather", "arguments": @@}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": @@}]',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "get_weather", "arguments": @@}<|action_end|>',
    "gigachat3": '<|function_call|>{"name": "get_weather", "arguments": @@}',
    "cohere": "<|START_ACTION|>[\n"
    '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": @@}\n]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"get_weather": @@}]<|tools_suffix|>',
    "llama4_json": '{"name": "get_weather", "parameters": @@}',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Prag</parameter>\n"
    "<parameter=unit>celsius</parameter>\n<parameter=days>3</parameter>\n<parameter=exact>true</parameter>\n</function>\n</seed:tool_call>",
    "deepseek_v32": DSML,
    "olmo3": '<function_calls>get_weather(city="Prag", unit="celsius", days=3, exact=True)</function_calls>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nPrag\n</parameter>\n<parameter=unit>\n"
    "celsius\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Prag</parameter>\n'
    '<parameter name="unit">celsius</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="exact">true</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]@@",
    "llama3_json": '{"name": "get_weather", "parameters": @@}',
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Prag</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>celsius</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Prag<|"|>,unit:<|"|>celsius<|"|>,days:3,exact:true}<tool_call|>',
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Prag<escape>,unit:<escape>celsius<escape>,"
    "days:3,exact:true}<end_function_call>",
    "pythonic": '<|tool_call_start|>[get_weather(city="Prag", unit="celsius", days=3, exact=True)]<|tool_call_end|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>@@"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": f"<{BAR}tool{GAP}calls{GAP}begin{BAR}><{BAR}tool{GAP}call{GAP}begin{BAR}>function"
    f"<{BAR}tool{GAP}sep{BAR}>get_weather\n```json\n@@\n```<{BAR}tool{GAP}call{GAP}end{BAR}><{BAR}tool{GAP}calls{GAP}end{BAR}>",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.get_weather <|constrain|>json<|message|>@@",
}  # fmt: skip
ARGUMENTS = '{"city": "Prag", "unit": "celsius", "days": 3, "exact": true}'


@pytest.mark.parametrize("name", EVERY)
def test_what_the_family_writes_by_itself_is_allowed(name: str) -> None:
    """Character by character as its template has it, with its own tokens; forced, and where it may call."""
    family = family_of(name)
    text = CANONICAL[name].replace("@@", ARGUMENTS)
    assert family.allows(family.hold(), text)
    assert family.allows(family.hold(tool_choice="auto"), text)
    assert family.read(text)[1] == [("get_weather", json.loads(ARGUMENTS))]
    wrong = text.replace("celsius", "kelvin")
    assert not family.allows(family.hold(), wrong)
    assert not family.allows(family.hold(tool_choice="auto"), wrong)


@pytest.mark.parametrize("name", EVERY)
def test_an_answer_is_json_or_a_call(name: str) -> None:
    """A format of the answer beside tools does not forbid the tools, nor calls the format."""
    family = family_of(name)
    format_ = {"type": "json_schema", "json_schema": {"strict": True, "schema": NOTHING}}
    held = family.hold(tool_choice="auto", response_format=format_)
    answer = "<|channel|>final<|message|>{}" if name == "harmony" else "{}"
    call = CANONICAL[name].replace("@@", ARGUMENTS)
    if name != "harmony" and FORMATS[name].bare:
        call = FORMATS[name].start + call
    assert family.allows(held, answer)
    assert family.allows(held, call)
    assert not family.allows(held, answer.replace("{}", "Hello"))
    alone = family.hold([], tool_choice="auto", response_format=format_)
    assert family.allows(alone, answer)
    assert not family.allows(alone, call)


# Numbers that chance makes and that no reader takes.
ABSURD = re.compile(r"\d{40}|\d[eE][+-]?\d{3}")
UNIQUE: Any = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", EVERY)
def test_a_keyword_that_cannot_be_enforced_is_named(name: str) -> None:
    """Refused by front-end or worker where it is insisted on, else told and passed over."""
    family = family_of(name)
    with pytest.raises((ApiError, BadRequest), match="uniqueItems"):
        family.walks(family.hold([tool("f", UNIQUE)]))
    held = family.hold([tool("f", UNIQUE, strict=False)])
    assert held.unenforced == ["uniqueItems"]
    assert family.walks(held)


@pytest.mark.parametrize("name", sorted(WITHOUT_GRAMMAR))
def test_calls_without_a_grammar_are_read_but_not_forced(name: str) -> None:
    """Strict ones are free, and that is told; to force one is refused with the format's name."""
    family = family_of(name)
    assert family.hold(tool_choice="auto") == OutputConstraint(None, ["strict"])
    with pytest.raises(ApiError, match=f"'{name}', which cannot be constrained"):
        family.hold()


def test_a_format_without_a_grammar_is_named() -> None:
    """The one that the template tells of, or that none is known."""
    family = family_of("json_tools", template="no sign of calls")
    family.model.markers = family.model.markers._replace(calls=None)
    with pytest.raises(ApiError, match="does not know"):
        family.hold()
    family.model.markers = family.model.markers._replace(
        calls=FORMATS["mistral"]._replace(name="new", constrained=False)
    )
    with pytest.raises(ApiError, match="'new', which cannot be constrained"):
        family.hold()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EVERY)
def test_tools_of_agents_are_called_rightly_in_every_format(name: str) -> None:
    """Not strict, so that what a format cannot hold is passed over and told; those schemas are left unchecked."""
    family = family_of(name)
    checked = passed = 0
    for parameters in TOOLS.values():
        tools = [tool("f", parameters, strict=False)]
        try:
            held = family.hold(tools)
        except ApiError:
            continue
        passed += bool(held.unenforced)
        for text in family.walks(held, range(AGENT_SEEDS)):
            if ABSURD.search(text):
                continue
            content, calls = family.read(text, tools)
            assert (content, bool(calls)) == ("", True), text
            if not held.unenforced:
                check(calls, tools)
                checked += len(calls)
    print(f"{name}: {checked} calls valid, {passed} of {len(TOOLS)} schemas with something passed over")
    assert checked > 5 * AGENT_SEEDS


def _referring(beside: Mapping[str, Any]) -> Any:
    """A tree whose places refer to the tree, with these keywords beside the references."""
    node = {"$ref": "#/$defs/node", **beside}
    return {
        "type": "object",
        "properties": {"tree": node},
        "required": ["tree"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 4}, "left": node, "right": dict(node)},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    }


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        *((name, beside) for name in EVERY for beside in ({}, {"description": "A branch."})),
        # In JSON the worker refuses these by name.
        *((name, {"minProperties": 1}) for name in ("pythonic", "olmo3", "gemma4", "function_gemma")),
    ],
)
def test_a_tree_with_documented_references_is_held(name: str, beside: dict[str, Any]) -> None:
    """pydantic writes a description beside each reference of a documented field."""
    family = family_of(name)
    tools = [tool("plant", _referring(beside), strict=False)]
    held = family.hold(tools, tool_choice="required")
    for text in family.walks(held, SEEDS[:3]):
        check(family.read(text, tools)[1], tools)
    if name in ("pythonic", "gemma4"):
        quote = '"' if name == "pythonic" else '<|"|>'
        inner = {"pythonic": '"left": {"name": "b"}', "gemma4": 'left:{name:<|"|>b<|"|>}'}[name]
        key, colon, comma = ('"name"', ": ", ", ") if name == "pythonic" else ("name", ":", ",")
        tree = f"{{{key}{colon}{quote}a{quote}{comma}{inner}}}"
        call = f"[plant(tree={tree})]" if name == "pythonic" else f"call:plant{{tree:{tree}}}"
        assert family.allows(held, f"{FORMATS[name].start}{call}{FORMATS[name].end}")


@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
@pytest.mark.parametrize("name", EVERY)
def test_choices_that_refer_to_themselves_cost_no_more_than_their_size(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four references to itself, each with a description: a tree of them has 4**16 leaves."""
    resolved, count = schema_types.resolved, 0

    def counted(schema: Any, root: Any) -> Any:
        nonlocal count
        count += 1
        return resolved(schema, root)

    monkeypatch.setattr(schema_types, "resolved", counted)
    itself = [{"$ref": "#/$defs/a", "description": str(place)} for place in range(4)]
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"a": {word: [*itself, {"type": "string", "maxLength": 9}]}},
    }
    family = family_of(name)
    tools = [tool("f", parameters, strict=False)]
    family.hold(tools)
    count_to_hold, count = count, 0
    text = CANONICAL.get(name, "").replace("@@", '{"x": "y"}')
    family.read(text, tools)
    assert count_to_hold <= 100
    assert count <= 100


def test_a_place_that_many_refer_to_is_not_written_for_each() -> None:
    """Past the longest grammar that a worker takes, building it ends with a 400."""
    wide = {"anyOf": [{"type": "string", "const": f"{place:06d}"} for place in range(200)]}
    names = {f"p{place}": {"$ref": "#/$defs/wide", "minLength": 1} for place in range(20_000)}
    parameters = {"type": "object", "properties": names, "$defs": {"wide": wide}}
    for name in ("pythonic", "gemma4", "qwen3_coder"):
        family = family_of(name)
        started = time.process_time()
        with pytest.raises(ApiError, match="shorten the schemas"):
            family.hold([tool("f", parameters, strict=False)])
        # Written for each it would take minutes.
        assert time.process_time() - started < 10


def test_alternatives_are_read_in_order_and_only_so_many() -> None:
    """References are followed, a list is read once, and one over the bound is left out."""
    root = {"$defs": {"two": {"anyOf": [{"const": 1}, {"$ref": "#/$defs/two"}, {"$ref": "#/$defs/deep"}]},
                      "deep": {"title": "D", "const": 2}}}  # fmt: skip
    parts = schema_types.alternatives(
        {"oneOf": [{"$ref": "#/$defs/two", "title": "own"}, {"const": 3}, True]}, root
    )
    assert [dict(part) for part in parts] == [{"const": 1}, {"title": "D", "const": 2}, {"const": 3}]
    many = {"anyOf": [{"const": place} for place in range(2 * schema_types.ALTERNATIVES_MAX)]}
    assert len(list(schema_types.alternatives(many, {}))) < schema_types.ALTERNATIVES_MAX
    own = schema_types.resolved({"$ref": "#/$defs/deep", "title": "own"}, root)
    assert dict(own) == {"title": "own", "const": 2}
    assert len(own) == 2
    long = "#/$defs/" + "x" * schema_types.REFERENCE_CHARS_MAX
    assert "$ref" in schema_types.resolved({"$ref": long}, {"$defs": {long[8:]: {"const": 1}}})
