"""Rules of insert and of its output."""

from __future__ import annotations

from zmqengine.conformance.front_end import Body, FrontEnd, expect
from zmqengine.conformance.rules import Make, rule

ABORTS_MAX = 10
"""Attempts to abort a request while it runs."""
WATERMARKS_MAX = 10
"""Watermarks after which a missing end counts as never sent. On a busy machine some of them were queued before
this process read them."""


def _room(front_end: FrontEnd) -> int:
    """The longest possible output for the usual prompt."""
    return int(front_end.welcome["limits"]["context_tokens_max"]) - 4


def _expect_end(end: Body, finish: str) -> None:
    expect(end.get("finish") == finish, f"it ended with {end.get('finish')!r} instead of {finish!r}")


@rule("I insert", "accepted, then every token once and in order, then one end; then nothing more")
def _insert(make: Make) -> None:
    front_end = make().open_session()
    accepted = front_end.accepted("r", max_tokens=12)
    expect(accepted["request"] == "r" and accepted.get("next_index", 0) == 0, "accepted is of something else")
    expect(accepted["epoch"] == front_end.welcome["epoch"], "accepted has another epoch")
    tokens, end = front_end.read("r")
    expect(len(tokens) == 12, f"{len(tokens)} tokens came instead of 12")
    _expect_end(end, "length")
    expect(end.get("prompt_tokens") == 3, f"3 tokens of prompt are counted as {end.get('prompt_tokens')}")
    expect(
        all(0 <= token < front_end.description["model"]["vocab_size"] for token in tokens), "no such token"
    )
    front_end.done(front_end.command("K", requests=["r"]))
    while not front_end.is_quiet():
        kind, frame = front_end.next_frame()
        expect(kind != "t" or not frame.get("rows"), "something comes after the end")


@rule("t token frame", "n counts the token frames of the session without a gap")
def _frames_are_counted(make: Make) -> None:
    front_end = make().open_session()
    front_end.generate("r", max_tokens=20)
    counted = [frame["n"] for kind, frame in front_end.frames if kind == "t"]
    expect(counted == list(range(len(counted))), f"n is {counted}")


@rule("Frames", "insert sent again is the same request; with other contents it is refused with conflict")
def _idempotent(make: Make) -> None:
    front_end = make().open_session()
    first = front_end.accepted("r", seed=7)
    again = front_end.accepted("r", seed=7)
    expect(again["seed"] == first["seed"], "sent again it has another seed")
    front_end.refused(front_end.insert("r", seed=8), "conflict")
    expect(len(front_end.read("r")[0]) == 8, "it does not have its 8 tokens")


@rule("Frames", "an unknown key in insert or in sampling is refused by name")
def _unknown_fields(make: Make) -> None:
    front_end = make().open_session()
    for fields in ({"best_of": 3}, {"sampling": {"best_of": 3}}):
        refused = front_end.refused(front_end.insert("r", **fields), "bad_request")
        expect("best_of" in refused["message"], "the message does not name the key")


@rule("I insert", "what is out of range is refused with bad_request")
def _out_of_range(make: Make) -> None:
    front_end = make().open_session()
    vocabulary = front_end.description["model"]["vocab_size"]
    for name, fields in (
        ("a token outside the vocabulary", {"prompt": [1, vocabulary]}),
        ("a negative token", {"prompt": [-1]}),
        ("max_tokens 0", {"max_tokens": 0}),
        ("a negative temperature", {"sampling": {"temperature": -0.1}}),
        ("top_p 0", {"sampling": {"top_p": 0}}),
        ("logprobs 21", {"logprobs": 21}),
        ("priority 101", {"priority": 101}),
        ("deadline_ms 0", {"deadline_ms": 0}),
        ("129 stop tokens", {"stop_token_ids": [1] * 129}),
        ("a request id of 65 characters", {"request": "x" * 65}),
    ):
        body = {"request": "r", "epoch": front_end.welcome["epoch"], "prompt": [5], "max_tokens": 4} | fields
        kind, answer = front_end.command("I", **body)
        expect(kind == "e" and answer.get("code") == "bad_request", f"{name} is answered with {kind!r}")
    body = {"request": "r", "epoch": front_end.welcome["epoch"], "prompt": [], "max_tokens": 4}
    front_end.refused(front_end.command("I", **body), "bad_request")


@rule("I insert", "prompt and max_tokens over the context are refused with context_exceeded")
def _context(make: Make) -> None:
    front_end = make().open_session()
    limit = front_end.welcome["limits"]["context_tokens_max"]
    front_end.refused(front_end.insert("r", [5, 6], max_tokens=limit - 1), "context_exceeded")


@rule("I insert", "another epoch is refused with stale_epoch")
def _stale(make: Make) -> None:
    front_end = make().open_session()
    front_end.refused(front_end.insert("r", epoch=b"\0" * 8), "stale_epoch")


@rule("I insert", "the seed that accepted names gives the same sampled output again")
def _seed(make: Make) -> None:
    front_end = make().open_session()
    # High enough that no model is sure of thirty tokens, as a small one is of a story.
    sampling = {"temperature": 100.0, "top_p": 0.95}
    seed = front_end.accepted("a", max_tokens=30, sampling=sampling)["seed"]
    expect(seed < 2**53, "the seed is not exact in a float of 64 bits")
    tokens, _ = front_end.read("a")
    again, _ = front_end.generate("b", max_tokens=30, sampling=sampling, seed=seed)
    expect(again == tokens, "the same seed gives another output")
    other, _ = front_end.generate("c", max_tokens=30, sampling=sampling, seed=seed ^ 1)
    expect(other != tokens, "another seed gives the same output")


@rule("I insert", "with emitted and the seed, the output goes on where it was")
def _emitted(make: Make) -> None:
    front_end = make().open_session()
    sampling = {"temperature": 1.0}
    whole, _ = front_end.generate("a", max_tokens=20, sampling=sampling, seed=11)
    for had in (1, 7, 19):
        rest, end = front_end.generate(
            f"b{had}", max_tokens=20, sampling=sampling, seed=11, emitted=whole[:had]
        )
        expect(whole[:had] + rest == whole, f"after {had} tokens it goes on as another output")
        _expect_end(end, "length")


@rule("I insert", "a prediction changes no token; one that is too long is refused with bad_request")
def _prediction(make: Make) -> None:
    front_end = make().open_session()
    longest = front_end.welcome["limits"].get("prediction_tokens_max", 0)
    front_end.refused(front_end.insert("long", prediction=[5] * (longest + 1)), "bad_request")
    if longest:
        plain, _ = front_end.generate("a", max_tokens=12, seed=3)
        for name, prediction in (("right", plain), ("half", [*plain[:6], 5, *plain[6:]]), ("wrong", [5] * 9)):
            again, _ = front_end.generate(name, max_tokens=12, seed=3, prediction=prediction[:longest])
            expect(again == plain, f"a {name} prediction gives another output")


@rule(
    "I insert", "with prefill_keep a part of the prompt is read, after `emitted` the same; or it is refused"
)
def _prefill_keep(make: Make) -> None:
    front_end = make().open_session()
    if not front_end.welcome["limits"].get("prefill_keep"):
        front_end.refused(front_end.insert("a", prefill_keep=0.5), "bad_request")
        return
    prompt = list(range(1, 9)) * 16
    for wrong in (0.0, 1.0):
        front_end.refused(front_end.insert("wrong", prompt, prefill_keep=wrong), "bad_request")
    front_end.refused(front_end.insert("pinned", prompt, prefill_keep=0.5, pin=True), "bad_request")
    whole, end = front_end.generate("a", prompt, max_tokens=12, seed=3, prefill_keep=0.5)
    expect(end["prompt_tokens"] == len(prompt), "prompt_tokens are not those of the whole prompt")
    expect(0 < end.get("kept_tokens", 0) < len(prompt), "kept_tokens do not say what was read")
    expect(not end.get("cached_tokens"), "some of the prompt was taken from the prompt cache")
    rest, _ = front_end.generate("b", prompt, max_tokens=12, seed=3, prefill_keep=0.5, emitted=whole[:5])
    expect(whole[:5] + rest == whole, "after 5 tokens it goes on as another output")


@rule("I insert", "forced output comes as it was given, with log-probabilities, and the row goes on after it")
def _forced(make: Make) -> None:
    front_end = make().open_session()
    if not front_end.welcome["limits"].get("forced"):
        return
    plain, _ = front_end.generate("a", max_tokens=12, seed=3)
    again, _ = front_end.generate("b", max_tokens=12, seed=3, forced=plain[:7], stop_token_ids=plain[:1])
    expect(again[:7] == plain[:7], "the output does not begin with the forced tokens")
    expect(len(again) > 7, "a stop token among the forced ones stopped the output")
    rest, _ = front_end.generate("c", max_tokens=12, seed=3, forced=plain[:7], emitted=plain[:4])
    expect(rest[:3] == plain[4:7], "with emitted, the forced tokens do not go on where they were")
    front_end.accepted("d", max_tokens=7, forced=plain[:7], logprobs=1)
    rows = front_end.rows("d")
    expect(
        [id_ for row in rows for id_ in row[2]] == plain[:7], "an output that is all forced is another one"
    )
    expect(all(logprob <= 0 for row in rows for logprob, _ in row[3]), "a log-probability is above 0")
    front_end.refused(front_end.insert("long", max_tokens=2, forced=plain[:3]), "bad_request")


@rule(
    "I insert",
    "reasoning is closed at thinking_max, also after `emitted`; up to there the tokens are the same",
)
def _thinking_max(make: Make) -> None:
    front_end = make().open_session()
    if not front_end.welcome["limits"].get("thinking_max"):
        return
    plain, _ = front_end.generate("a", max_tokens=12, seed=3)
    # A closer that begins as the reasoning ends would only be completed.
    closer = [next((token for token in plain[2:] if token not in plain[:2]), plain[2]), *plain[5:7]]
    bound = {"tokens": 2, "closer": closer, "then": plain[:1], "opened": True}
    wanted = plain[:2] + closer + plain[:1]
    whole, _ = front_end.generate("b", max_tokens=12, seed=3, thinking_max=bound)
    expect(whole[:6] == wanted, f"{whole[:6]} for {wanted}")
    for had in (1, 3, 5, 7):
        rest, _ = front_end.generate(
            f"c{had}", max_tokens=12, seed=3, thinking_max=bound, emitted=whole[:had]
        )
        expect(whole[:had] + rest == whole, f"after {had} tokens it goes on as another output")
    free, _ = front_end.generate("d", max_tokens=12, seed=3, thinking_max={**bound, "tokens": 12})
    expect(free == plain, "a bound that is not reached changes the output")
    front_end.refused(front_end.insert("e", thinking_max={**bound, "closer": []}), "bad_request")
    front_end.refused(front_end.insert("f", thinking_max={**bound, "close": [1]}), "bad_request")


@rule("I insert", "a stop token ends the output with stop, and is its last token")
def _stop(make: Make) -> None:
    front_end = make().open_session()
    whole, _ = front_end.generate("a", max_tokens=20, seed=1)
    wanted = whole[5]
    tokens, end = front_end.generate("b", max_tokens=20, seed=1, stop_token_ids=[wanted])
    expect(tokens == whole[: whole.index(wanted) + 1], "the output does not end with the stop token")
    _expect_end(end, "stop")


@rule("t token frame", "with logprobs each token has its own and the n best; without, none")
def _logprobs(make: Make) -> None:
    front_end = make().open_session()
    front_end.accepted("with", max_tokens=6, logprobs=3)
    for _, _, tokens, logprobs, *_ in front_end.rows("with"):
        expect(len(logprobs) == len(tokens), "not every token has an entry")
        for logprob, best in logprobs:
            expect(logprob <= 0, f"a log-probability is {logprob}")
            expect(len(best) == 3, f"{len(best)} candidates come instead of 3")
    front_end.accepted("without", max_tokens=6)
    for row in front_end.rows("without"):
        expect(len(row) < 4 or row[3] is None, "there are log-probabilities without a request for them")


@rule("U resume", "gives the output from any index on, and an empty row beyond its end")
def _resume(make: Make) -> None:
    front_end = make().open_session()
    tokens, _ = front_end.generate("r", max_tokens=12)
    epoch = front_end.welcome["epoch"]
    for index in (0, 5, 11):
        replay = front_end.done(front_end.command("U", request="r", epoch=epoch, from_index=index), "u")
        expect(replay["row"][1:3] == [index, tokens[index:]], f"from {index} on comes something else")
        expect(replay["row"][4]["finish"] == "length", "the end is not sent again")
    beyond = front_end.done(front_end.command("U", request="r", epoch=epoch, from_index=100), "u")
    expect(beyond["row"][1:3] == [12, []], "beyond the end comes something else than an empty row")
    front_end.refused(front_end.command("U", request="no", epoch=epoch, from_index=0), "unknown_request")


@rule("K ack", "forgets what has ended, and passes over what has not")
def _ack(make: Make) -> None:
    front_end = make().open_session()
    epoch = front_end.welcome["epoch"]
    front_end.generate("done", max_tokens=4)
    front_end.accepted("running", max_tokens=_room(front_end))
    front_end.done(front_end.command("K", requests=["done", "running", "unknown"]))
    front_end.refused(front_end.command("U", request="done", epoch=epoch, from_index=0), "unknown_request")
    front_end.done(front_end.command("U", request="running", epoch=epoch, from_index=0), "u")
    front_end.done(front_end.command("A", request="running"))


@rule("A abort", "ends a request with abort, once")
def _abort(make: Make) -> None:
    front_end = make().open_session()
    for attempt in range(ABORTS_MAX):
        finishes = _finishes_of_aborted(front_end, f"r{attempt}")
        expect(len(finishes) == 1, f"it has {len(finishes)} ends")
        if finishes == ["abort"]:
            return
        # A fast worker may finish before the abort arrives.
        expect(finishes[0] in ("stop", "length"), f"it ended with {finishes[0]!r} instead of 'abort'")
    expect(False, f"of {ABORTS_MAX} requests each ended by itself before its abort arrived")


def _finishes_of_aborted(front_end: FrontEnd, request: str) -> list[str]:
    front_end.accepted(request, max_tokens=_room(front_end))
    next(front_end.rows(request))
    front_end.done(front_end.command("A", request=request))
    front_end.done(front_end.command("A", request=request))
    finishes: list[str] = []
    watermarks = 0
    while watermarks < WATERMARKS_MAX and not (finishes and front_end.is_quiet()):
        kind, frame = front_end.next_frame()
        rows = frame["rows"] if kind == "t" else ()
        finishes += [row[4]["finish"] for row in rows if row[0] == request and len(row) > 4 and row[4]]
        watermarks += kind == "w"
    return finishes


@rule("A abort", "of an id that is not there yet refuses the insert that comes later with aborted")
def _early_abort(make: Make) -> None:
    front_end = make().open_session()
    front_end.done(front_end.command("A", request="later"))
    front_end.refused(front_end.insert("later"), "aborted")


@rule("I insert", "deadline_ms ends a request with deadline, or refuses it with that code")
def _deadline(make: Make) -> None:
    front_end = make().open_session()
    kind, answer = front_end.insert("r", max_tokens=_room(front_end), deadline_ms=1)
    if kind == "e":
        expect(answer.get("code") == "deadline", f"it is refused with {answer.get('code')!r}")
    else:
        _expect_end(front_end.read("r")[1], "deadline")


@rule("w watermark", "tells within seconds how far each request is that the session holds")
def _watermark(make: Make) -> None:
    front_end = make().open_session()
    front_end.generate("r", max_tokens=3)
    for _ in range(1000):
        kind, frame = front_end.next_frame()
        if kind == "w":
            expect(frame["rows"] == [["r", 3, True]], f"it tells {frame['rows']}")
            return
    expect(False, "there is no watermark among 1000 frames")


@rule("Dialogue", "many requests of two sessions each get their own tokens and one end")
def _many(make: Make) -> None:
    front_ends = [make().open_session() for _ in range(2)]
    for index, front_end in enumerate(front_ends):
        for number in range(10):
            front_end.accepted(f"r{number}", [3 + index, 4 + number], max_tokens=5 + number, seed=number)
    for front_end in front_ends:
        had: dict[str, int] = {}
        ends: dict[str, str] = {}
        while len(ends) < 10:
            kind, frame = front_end.next_frame()
            for name, first, tokens, *rest in frame["rows"] if kind == "t" else ():
                expect(first == had.get(name, 0), f"expected index {had.get(name, 0)} of {name}, got {first}")
                expect(name not in ends, f"{name} goes on after its end")
                had[name] = first + len(tokens)
                if len(rest) > 1 and rest[1] is not None:
                    ends[name] = rest[1]["finish"]
        expect(
            had == {f"r{number}": 5 + number for number in range(10)}, f"the outputs are {had} tokens long"
        )
        expect(set(ends.values()) == {"length"}, f"they ended with {set(ends.values())}")
