"""Table rows as text: pure functions of the workers' histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zmqengine.protocol.messages import RequestInfo
from zmqengine_top.history import WorkerHistory

WORKER_COLUMNS = ("worker", "state", "model", "run", "wait", "tok/s", "memory", "pass")
REQUEST_COLUMNS = ("request", "front-end", "phase", "prompt", "output", "tok/s", "age")
SESSION_COLUMNS = ("front-end", "worker", "run", "wait", "held", "behind")


class TableRow(NamedTuple):
    """One row of a table: a stable key, and its cells."""

    key: str
    cells: tuple[str, ...]


class RequestKey(NamedTuple):
    """The worker, session and request id of a row."""

    worker: str
    session: str
    request: str

    @property
    def key(self) -> str:
        """The key of the request's row."""
        return "/".join(self)


class Line(NamedTuple):
    """A request with its key, the name of its client and its token rate."""

    target: RequestKey
    info: RequestInfo
    client: str
    rate: float | None


Order = Callable[[Line], "float | str"]
ORDERS: tuple[tuple[str, Order], ...] = (
    ("age", lambda line: -line.info.age_s),
    ("tok/s", lambda line: -(line.rate or 0.0)),
    ("prompt", lambda line: -line.info.prompt_tokens),
    ("output", lambda line: -line.info.output_tokens),
    ("front-end", lambda line: line.client),
    ("phase", lambda line: line.info.phase),
)
"""Sort orders of requests; ties keep the worker's order."""


def size(number: float) -> str:
    """A number of bytes with a unit, powers of 1024, in at most three digits."""
    for unit in ("", "K", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if unit == "" or number >= 10 else f"{number:.1f}{unit}"
        number /= 1024
    return f"{number:.1f}T"


def span(seconds: float) -> str:
    """A duration in at most 5 characters."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02}"
    if seconds < 86_400:
        return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02}"
    return f"{int(seconds) // 86_400}d{int(seconds) % 86_400 // 3600:02}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"


def worker_row(history: WorkerHistory, now_s: float) -> TableRow:
    """The row of one worker; a silent worker shows for how long, and one that a launcher has not loaded its state."""
    latest, entry = history.latest, history.entry
    if latest.status is None and entry is not None and entry.state != "ready":
        done = "" if entry.fraction is None else f" {entry.fraction:.0%}"
        waiting = str(entry.waiting) if entry.waiting else ""
        needs = f"needs {size(entry.need_bytes)}"
        cells = (history.worker, f"{entry.state}{done}", entry.name, "", waiting, "", needs, "")
        return TableRow(history.worker, cells)
    if latest.status is None:
        silent = "" if history.silent_since_s is None else f" {span(now_s - history.silent_since_s)}"
        model = history.seen.model if history.seen is not None else ""
        return TableRow(history.worker, (history.worker, f"silent{silent}", model, "", "", "", "", ""))
    held, limit = sum(latest.memory.values()), latest.memory_limit
    share = f"{held / limit:.0%} of {size(limit)}" if limit else size(held)
    pass_ms = latest.number("pass_ms_p50")
    return TableRow(
        history.worker,
        (
            history.worker,
            _state(history),
            latest.model,
            f"{latest.number('running') or 0:.0f}",
            f"{latest.number('queued') or 0:.0f}",
            _rate(history.rate("generated_tokens")),
            share,
            "" if pass_ms is None else f"{pass_ms:.1f} ms",
        ),
    )


def _state(history: WorkerHistory) -> str:
    status, description = history.latest.status, history.latest.description
    assert status is not None
    if status.state in ("loading", "warming") and description is not None:
        fraction = description.progress.fraction
        return f"{status.state}{'' if fraction is None else f' {fraction:.0%}'}"
    return f"{status.state} {span(status.uptime_s)}"


def request_lines(histories: Iterable[WorkerHistory]) -> list[Line]:
    """All requests that have not ended, in the workers' order."""
    lines = []
    for history in histories:
        status = history.latest.status
        if status is None:
            continue
        clients = {session.id: session.client for session in status.sessions}
        for info in status.requests:
            target = RequestKey(history.worker, info.session, info.request)
            lines.append(
                Line(target, info, clients.get(info.session, info.session), history.request_rate(info))
            )
    return lines


def waits_word(info: RequestInfo) -> str:
    """The resource that a request waits for, without the reason."""
    return info.waits_for.partition(":")[0]


def request_row(line: Line) -> TableRow:
    info = line.info
    phase = f"waits: {waits_word(info)}" if info.waits_for else info.phase
    prompt = f"{info.prompt_tokens:,}"
    if info.phase == "prefill" and info.prompt_tokens:
        prompt = f"{min(1.0, info.prefilled_tokens / info.prompt_tokens):.0%} of {prompt}"
    elif info.cached_tokens:
        prompt = f"{prompt} ({info.cached_tokens:,} c)"
    output = f"{info.output_tokens:,}/{info.max_tokens:,}"
    return TableRow(
        line.target.key,
        (
            _middle(info.request, 16),
            _middle(line.client, 12),
            phase,
            prompt,
            output,
            _rate(line.rate),
            span(info.age_s),
        ),
    )


def session_rows(histories: Iterable[WorkerHistory]) -> list[TableRow]:
    """A row for every front-end of every worker."""
    rows = []
    for history in histories:
        status = history.latest.status
        for session in status.sessions if status is not None else ():
            behind = f"{session.unsent_tokens:,} tokens" if session.lagging else ""
            cells = (
                _middle(session.client or session.id, 30), history.worker, str(session.running), str(session.waiting),
                str(session.held), behind,
            )  # fmt: skip
            rows.append(TableRow(f"{history.worker}/{session.id}", cells))
    return rows


def details(history: WorkerHistory) -> list[str]:
    """Four lines: memory by part, prefix cache, passes, and reasons to wait."""
    latest = history.latest
    status = latest.status
    if status is None and history.entry is not None and history.entry.state != "ready":
        return [history.entry.message or "it is loaded when a request names it", "", "", ""]
    if status is None:
        return ["no answer: requests go on when the worker is back", "", "", ""]
    parts = sorted(((held, part) for part, held in latest.memory.items() if held), reverse=True)
    memory = ", ".join(f"{part.replace('_', ' ')} {size(held)}" for held, part in parts)
    reasons = Counter(waits_word(info) for info in status.requests if info.waits_for)
    waits = ", ".join(f"{number} for {reason}" for reason, number in reasons.most_common())
    return [
        f"memory   {memory or 'nothing held'}",
        f"cache    {_cache(history)}",
        f"passes   {_passes(history)}",
        f"waits    {waits or 'nobody'}",
    ]


def _cache(history: WorkerHistory) -> str:
    latest = history.latest
    entries = latest.number("prompt_cache_entries") or 0
    held, most = latest.number("prompt_cache_bytes") or 0, latest.number("prompt_cache_bytes_max") or 0
    read, cached = latest.number("prompt_tokens") or 0, latest.number("cached_tokens") or 0
    share = f", {cached / (read + cached):.0%} of prompt tokens from it" if read + cached else ""
    return f"{entries:.0f} prompts, {size(held)} of {size(most)}{share}"


def _passes(history: WorkerHistory) -> str:
    latest = history.latest
    each = _rate(history.rate("passes"))
    next_us, outside_us = latest.number("pass_next_us_p50"), latest.number("pass_outside_us_p50")
    slow, restarts = latest.number("slow_passes") or 0, latest.number("restarts") or 0
    text = f"{each or 0}/s"
    if next_us is not None and outside_us is not None:
        text += f", step {next_us / 1000:.1f} ms + {outside_us / 1000:.2f} around it"
    text += f", {slow:.0f} slow" if slow else ""
    return text + (f", restarted {restarts:.0f}x" if restarts else "")


def _middle(text: str, width: int) -> str:
    """The text shortened in its middle to `width` characters, since both ends distinguish requests."""
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[-half:]}"
