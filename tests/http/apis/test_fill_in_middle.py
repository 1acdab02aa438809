"""A suffix is honoured where the tokenizer has the tokens for it."""

from __future__ import annotations

import pytest

from tests.http.front import post, serving
from tests.http.scripted import ScriptedClient
from zmqengine_http import HttpConfig

BAR, GAP = "\uff5c", "\u2581"
STYLES = {
    "qwen": (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "{0}def f():{1}\n  return é{2}"),
    "starcoder": (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "{0}def f():{1}\n  return é{2}"),
    "deepseek": (
        [f"<{BAR}fim{GAP}{name}{BAR}>" for name in ("begin", "hole", "end")],
        "{0}def f():{1}\n  return é{2}",
    ),
    "codellama": ([f"{GAP}<PRE>", f"{GAP}<SUF>", f"{GAP}<MID>"], "{0}def f():{1}\n  return é{2}"),
    "codestral": (["[PREFIX]", "[SUFFIX]"], "{1}\n  return é{0}def f():"),
}
BODY = {"prompt": "def f():", "suffix": "\n  return é", "stream": False}


@pytest.mark.parametrize(("marks", "layout"), STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("as_ids", [False, True])
def test_prefix_and_suffix_stand_where_the_model_was_taught(
    marks: list[str], layout: str, as_ids: bool
) -> None:
    """By the names of its tokens; another mark ends the middle, and never is in it."""
    client = ScriptedClient(lambda prompt: f"x = 1{marks[0]}more", special=marks)
    with serving(HttpConfig(), lambda address, on_event: client) as front:
        prompt = client._tokenizer.encode("def f():") if as_ids else "def f():"
        reply = post(front, "/v1/completions", {**BODY, "prompt": prompt})
        assert reply.status == 200, reply.body
        choice = reply.json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("x = 1", "stop")
    stream = client.streams[0]
    rendered = client._tokenizer.decode(stream._prompt, skip_special_tokens=False)
    assert rendered == layout.format(*marks)
    assert [client._tokenizer.token_id(mark) in stream._prompt for mark in marks] == [True] * len(marks)


def test_a_model_without_such_tokens_says_so() -> None:
    """By the name of the field; an empty suffix asks for nothing."""
    with serving(HttpConfig(), lambda address, on_event: ScriptedClient(lambda prompt: "yes")) as front:
        reply = post(front, "/v1/completions", BODY)
        assert (reply.status, reply.error["param"]) == (400, "suffix")
        assert "filling in the middle" in reply.error["message"]
        assert post(front, "/v1/completions", {**BODY, "suffix": ""}).status == 200
