"""Rules of ctl, and of malformed messages."""

from __future__ import annotations

from zmqengine.conformance.front_end import NotConforming, expect
from zmqengine.conformance.rules import Make, rule

STATES = {"loading", "warming", "ready", "draining", "failed"}


@rule("Control", "describe says who the worker is, its state, its sockets, its model and its limits")
def _describe(make: Make) -> None:
    described = make().description
    expect(described["state"] in STATES, f"the state is {described['state']!r}")
    expect(len(described["epoch"]) == 8, "the epoch has not 8 bytes")
    lowest, highest = described["protocol"]
    expect(lowest <= 1 <= highest, f"version 1 is not among {described['protocol']}")
    model, limits = described["model"], described["limits"]
    expect(model["vocab_size"] > 0 and model["context_tokens"] > 0, "the model has no size")
    expect(all(token < model["vocab_size"] for token in model["eos_token_ids"]), "an end token is no token")
    expect(limits["prompt_tokens_max"] < limits["context_tokens_max"], "a prompt may fill the whole context")


@rule("Control", "ping is answered with done, the same call and the epoch of describe")
def _ping(make: Make) -> None:
    front_end = make()
    answer = front_end.done(front_end.ask("P"))
    expect(answer["epoch"] == front_end.description["epoch"], "ping has another epoch than describe")


@rule("Frames", "a key that is not known is ignored, outside of insert")
def _unknown_key(make: Make) -> None:
    front_end = make()
    front_end.done(front_end.ask("P", future=[1, {"a": None}]))
    front_end.done(front_end.ask("D", future="x"), "d")


@rule("Control", "status tells state, age of the pass, numbers and facts")
def _status(make: Make) -> None:
    front_end = make()
    status = front_end.done(front_end.ask("S"), "s")
    expect(status["state"] in STATES, f"the state is {status['state']!r}")
    expect(status["pass_age_ms"] >= 0 and status["uptime_s"] >= 0, "a time is negative")
    expect(all(isinstance(value, (int, float)) for value in status["numbers"].values()), "a number is none")
    expect(all(isinstance(value, str) for value in status["facts"].values()), "a fact is no text")


@rule("Control", "metrics is text, and tokenizer a file whose hash describe has named")
def _metrics_and_tokenizer(make: Make) -> None:
    front_end = make()
    expect(front_end.done(front_end.ask("M"), "m")["text"].strip(), "there are no metrics")
    tokenizer = front_end.done(front_end.ask("Z"), "z")
    expect(isinstance(tokenizer["tokenizer_json"], bytes), "the tokenizer is not bytes")
    expect(
        tokenizer["hash"] == front_end.description["model"]["tokenizer_hash"],
        "the tokenizer's hash is not that of describe",
    )


@rule("Failures", "what is malformed or unknown is refused, and the next message is answered")
def _malformed(make: Make) -> None:
    front_end = make()
    for socket in (front_end.ctl, front_end.cmd):
        for kind, body in (
            ("P", b"\xc1"),
            ("P", b"\x93\x01\x02\x03"),
            ("P", {"call": -1}),
            ("~", {"call": 1}),
        ):
            try:
                reply, _ = front_end.ask_raw(socket, kind, body)
            except NotConforming as problem:
                raise NotConforming(f"after {kind!r} {body!r}: {problem}") from problem
            expect(reply == "e", f"{kind!r} {body!r} is answered with {reply!r}")
    front_end.done(front_end.ask("P"))
