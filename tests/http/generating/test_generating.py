"""Chats and completions on a real worker: what is streamed is what is not, and every number is right."""

from __future__ import annotations

import codecs
from typing import Any

import pytest

from tests.http.front import Front, Reply, chat, post, serving
from tests.http.scripted import ScriptedClient
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_of(reply: Reply, choice: int = 0) -> str:
    """The text of a streamed choice."""
    parts = [c for event in reply.events for c in event["choices"] if c["index"] == choice]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)


def finish_of(reply: Reply, choice: int = 0) -> str:
    """The finish reason of a streamed choice; only its last event has one."""
    reasons = [c["finish_reason"] for event in reply.events for c in event["choices"] if c["index"] == choice]
    assert all(reason is None for reason in reasons[:-1])
    return str(reasons[-1])


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, {"prompt": "Once"})])
def test_a_stream_is_the_whole_in_pieces(front: Front, path: str, body: dict[str, Any]) -> None:
    """Text, finish reason and usage are the same either way, for the same seed."""
    body = {**body, "seed": 5, "max_tokens": 30}
    whole = post(front, path, body).json
    streamed = post(front, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    choice = whole["choices"][0]
    assert text_of(streamed) == (choice["message"]["content"] if path == CHAT else choice["text"])
    assert finish_of(streamed) == choice["finish_reason"] == "length"
    *events, last = streamed.events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    assert len({(event["id"], event["created"], event["object"]) for event in streamed.events}) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, {"prompt": "Once"})])
def test_the_workers_times_stand_beside_the_usage(
    front: Front, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Where a request asks for them, as llama.cpp's clients do."""
    body = {**body, "max_tokens": 5, "stream": stream, **usage_if(stream)}
    reply = post(front, path, {**body, "timings_per_token": True})
    timings = (reply.events[-1] if stream else reply.json)["timings"]
    usage = (reply.events[-1] if stream else reply.json)["usage"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 5
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["prompt_ms"] > 0
    assert timings["predicted_ms"] > 0
    reply = post(front, path, body)
    assert "timings" not in (reply.events[-1] if stream else reply.json)


def test_a_stream_begins_with_the_role(front: Front) -> None:
    """The first delta of a chat says who speaks; no event has usage unless asked for."""
    events = post(front, CHAT, chat(stream=True, max_tokens=2)).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in events[0]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 64, 65, 1000])
def test_an_answer_does_not_depend_on_how_its_tokens_came(chunk_tokens: int) -> None:
    """One at a time or many that had piled up, with and without a stop string to look for: the same text, end and
    usage, and characters whole in every event.
    """
    said = "naïve 日本語 👩‍👧 " * 20
    scripted = ScriptedClient(lambda prompt: said, chunk_tokens=chunk_tokens)
    body: dict[str, Any] = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    tokens = len(said.encode()) + 1
    with serving(HttpConfig(), lambda address, on_event: scripted) as front:
        for more in ({}, {"stop": "never"}, {"logprobs": 0}):
            reply = post(front, TEXT, {**body, **more, "max_tokens": 2000})
            assert (text_of(reply), finish_of(reply)) == (said, "stop")
            assert reply.events[-1]["usage"]["completion_tokens"] == tokens
            assert not any(
                "\ufffd" in choice["text"] for event in reply.events for choice in event["choices"]
            )
        cut = post(front, TEXT, {**body, "max_tokens": tokens - 4})
        assert (text_of(cut), finish_of(cut)) == (said[:-2] + "\ufffd", "length")


def test_usage_counts_every_token(front: Front) -> None:
    """The end token counts, as it was made; its text is not in the answer."""
    usage = post(front, TEXT, {"prompt": [5, 6, 7], "max_tokens": 100}).json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 51, 54)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_an_end_token_ends_and_ignore_eos_goes_on(front: Front) -> None:
    """The fake model ends at token 50."""
    body = {"prompt": [5], "max_tokens": 60}
    assert post(front, TEXT, body).json["choices"][0]["finish_reason"] == "stop"
    longer = post(front, TEXT, {**body, "ignore_eos": True}).json
    assert (longer["choices"][0]["finish_reason"], longer["usage"]["completion_tokens"]) == ("length", 60)


def test_the_text_is_that_of_the_tokens(front: Front, worker: FakeWorker) -> None:
    """Nothing is added, lost or stripped between the worker and the body."""
    tokens = worker.expected_tokens([9, 9], 20, seed=3)
    text = post(front, TEXT, {"prompt": [9, 9], "max_tokens": 20, "seed": 3}).json["choices"][0]["text"]
    assert text == post(front, "/detokenize", {"tokens": tokens}).json["prompt"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_found_across_tokens(front: Front, worker: FakeWorker, stream: bool) -> None:
    """It is never in the output, the finish is stop, and tokens after it are not counted."""
    body: dict[str, Any] = {"prompt": [9, 8], "max_tokens": 40, "seed": 3}
    whole = post(front, TEXT, body).json["choices"][0]["text"]
    stop = whole[20:24]
    assert len(stop.encode()) > 3
    reply = post(front, TEXT, {**body, "stop": ["not there", stop], "stream": stream, **usage_if(stream)})
    text = text_of(reply) if stream else reply.json["choices"][0]["text"]
    finish = finish_of(reply) if stream else reply.json["choices"][0]["finish_reason"]
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    assert text == whole[: whole.index(stop)]
    assert finish == "stop"
    detokenized = [
        post(front, "/detokenize", {"tokens": worker.expected_tokens([9, 8], n, seed=3)}).json["prompt"]
        for n in range(1, 41)
    ]
    assert usage["completion_tokens"] == 1 + next(n for n, text in enumerate(detokenized) if stop in text)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nothing_ends_an_answer_before_min_tokens(front: Front, path: str) -> None:
    """Neither a stop string nor the end token, which the fake model makes at token 50; over max_tokens is a 400."""
    body = {**(chat() if path == CHAT else {"prompt": [9, 8]}), "max_tokens": 60, "seed": 3}

    def ask(**fields: Any) -> tuple[str, str, int]:
        reply = post(front, path, {**body, **fields}).json
        choice = reply["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        return text, choice["finish_reason"], reply["usage"]["completion_tokens"]

    whole, finish, count = ask()
    assert (finish, count) == ("stop", 51)
    longer = ask(min_tokens=60)
    assert longer[1:] == ("length", 60)
    stop = whole[1:3]
    assert ask(stop=stop)[0] == whole[:1]
    assert ask(stop=stop, min_tokens=60) == longer
    later = next(text for at in range(30, len(whole)) if whole.index(text := whole[at]) < 5)
    found, finish, count = ask(stop=later, min_tokens=20)
    assert whole.startswith(found + later)
    assert (finish, count > 20) == ("stop", True)
    over = post(front, path, {**body, "min_tokens": 61})
    assert (over.status, "min_tokens" in over.json["error"]["message"]) == (400, True)


def usage_if(stream: bool) -> dict[str, object]:
    return {"stream_options": {"include_usage": True}} if stream else {}


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_have_seeds_of_their_own(front: Front, stream: bool) -> None:
    """Choice i is what seed + i gives alone; the prompt is counted once."""
    alone = [
        post(front, CHAT, chat(seed=seed, max_tokens=9)).json["choices"][0]["message"]["content"]
        for seed in (7, 8, 9)
    ]
    reply = post(front, CHAT, chat(seed=7, n=3, max_tokens=9, stream=stream, **usage_if(stream)))
    if stream:
        texts, usage = [text_of(reply, choice) for choice in range(3)], reply.events[-1]["usage"]
    else:
        assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
        texts, usage = [c["message"]["content"] for c in reply.json["choices"]], reply.json["usage"]
    assert texts == alone
    assert usage["completion_tokens"] == 27
    assert usage["prompt_tokens"] == post(front, CHAT, chat(max_tokens=1)).json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_the_prompt_change_nothing_of_the_output(front: Front, stream: bool) -> None:
    """The token at an index is drawn by the seed and the index, and penalties count the output alone."""
    body = {"prompt": "ABC", "max_tokens": 9, "n": 2, "seed": 7, "min_tokens": 2, "stream": stream}
    plain = post(front, TEXT, {**body, "logprobs": 1})
    echoed = post(front, TEXT, {**body, "logprobs": 1, "echo": True})
    texts = [
        [text_of(reply, c) for c in range(2)] if stream else [c["text"] for c in reply.json["choices"]]
        for reply in (plain, echoed)
    ]
    assert texts[1] == ["ABC" + text for text in texts[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_gives_n_choices_each(front: Front, stream: bool) -> None:
    """Choices are in the order of prompts, n for each, and those that the prompt gives alone with the same seed."""
    singles = [
        post(front, TEXT, {"prompt": prompt, "max_tokens": 5, "seed": seed}).json
        for prompt, seed in (([1, 2], 7), ([1, 2], 8), ([3], 7), ([3], 8))
    ]
    reply = post(
        front,
        TEXT,
        {"prompt": [[1, 2], [3]], "n": 2, "seed": 7, "max_tokens": 5, "stream": stream, **usage_if(stream)},
    )
    texts = [text_of(reply, c) for c in range(4)] if stream else [c["text"] for c in reply.json["choices"]]
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    assert texts == [single["choices"][0]["text"] for single in singles]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 20)
    both = post(front, TEXT, {"prompt": ["Once", "Twice"], "max_tokens": 1}).json
    assert [choice["index"] for choice in both["choices"]] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_go_with_their_tokens(front: Front, stream: bool) -> None:
    """One entry a token, the end token aside, with as many alternatives as asked for."""
    reply = post(front, CHAT, chat(seed=1, logprobs=True, top_logprobs=2, stream=stream))
    if stream:
        found = [c["logprobs"]["content"] for e in reply.events for c in e["choices"] if c["logprobs"]]
        entries, text = [entry for content in found for entry in content], text_of(reply)
    else:
        choice = reply.json["choices"][0]
        entries, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert len(entries) == 50
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode("utf-8", "ignore") == text.replace("\ufffd", "")


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_the_older_shape(front: Front, stream: bool) -> None:
    """Parallel lists, with offsets that go on from event to event."""
    body = {"prompt": [4], "max_tokens": 40, "logprobs": 3, "stream": stream, "seed": 1}
    reply = post(front, TEXT, body)
    if stream:
        shapes = [c["logprobs"] for e in reply.events for c in e["choices"] if c["logprobs"]]
        text = text_of(reply)
    else:
        shapes, text = [reply.json["choices"][0]["logprobs"]], reply.json["choices"][0]["text"]
    tokens = [token for shape in shapes for token in shape["tokens"]]
    offsets = [offset for shape in shapes for offset in shape["text_offset"]]
    assert len(tokens) == len(offsets) == 40
    # A lone byte is no character before the next one shows that it will never be.
    decoder, known = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset == len(known)
        is_part = token.startswith("bytes:")
        known += decoder.decode(bytes.fromhex(token[6:].replace("\\x", "")) if is_part else token.encode())
    assert text == known + decoder.decode(b"", final=True)
    assert all(0 < len(top) <= 3 for shape in shapes for top in shape["top_logprobs"])
    assert all(len(shape["token_logprobs"]) == len(shape["tokens"]) for shape in shapes)


def test_without_max_tokens_a_chat_may_fill_the_context(front: Front) -> None:
    """As OpenAI has it; a completion gets 16 tokens."""
    assert post(front, CHAT, chat(ignore_eos=True)).json["usage"]["total_tokens"] == 4096
    assert post(front, TEXT, {"prompt": [4], "max_tokens": None}).json["usage"]["completion_tokens"] == 16


def test_nulls_are_defaults(front: Front) -> None:
    """Client libraries send every option they have, as null."""
    names = [
        "stop",
        "n",
        "stream",
        "logit_bias",
        "tools",
        "tool_choice",
        "seed",
        "logprobs",
        "stream_options",
        "echo",
    ]
    body = {"prompt": "Hi", **dict.fromkeys(name for name in names if not name.startswith("tool"))}
    assert post(front, TEXT, body).status == 200
    assert post(front, CHAT, chat(**dict.fromkeys(name for name in names if name != "echo"))).status == 200


def test_harmless_fields_are_ignored(front: Front) -> None:
    """They change nothing of the answer."""
    extra = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert post(front, CHAT, chat(max_tokens=1, **extra)).status == 200


def test_developer_is_system_where_the_template_knows_no_other(front: Front) -> None:
    """Newer clients write developer for what templates call system."""
    ids = [
        post(front, "/tokenize", {"messages": [{"role": role, "content": "x"}]}).json["tokens"]
        for role in ("developer", "system")
    ]
    assert ids[0] == ids[1]


def test_tokenize_and_detokenize_agree(front: Front) -> None:
    """A text comes back as it was; counts and limits are told."""
    reply = post(front, "/tokenize", {"prompt": "Zażółć 🦊", "return_token_strs": True}).json
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) == len("Zażółć 🦊".encode())
    assert reply["max_model_len"] == 4096
    assert post(front, "/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": "Zażółć 🦊"}


@pytest.mark.parametrize("text", ["é👍", "plain", "a\u200d👩‍👩‍👧 b"])
def test_the_bytes_of_logprobs_join_to_the_text(text: str) -> None:
    """Tokens that are part of a character have bytes too, which is what the field is for; offsets end with the text."""
    with serving(HttpConfig(), lambda address, on_event: ScriptedClient(lambda prompt: text)) as front:
        asked = chat(logprobs=True, top_logprobs=2)
        content = post(front, CHAT, asked).json["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
        assert all(isinstance(top["bytes"], list) for entry in content for top in entry["top_logprobs"])
        choice = post(front, TEXT, {"prompt": "a", "logprobs": 1, "max_tokens": 100}).json["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(choice["text"]) == len(text)
        assert all(token == "" or "\ufffd" not in token for token in choice["logprobs"]["tokens"])
