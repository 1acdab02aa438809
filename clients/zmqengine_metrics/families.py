"""Snapshots of workers as metric families of `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from zmqengine.protocol import messages
from zmqengine.protocol.launcher import ModelEntry, ModelState
from zmqengine_metrics import table
from zmqengine_metrics.snapshot import Snapshot

OURS = ("model_name", "worker")
VLLM = ("model_name", "engine")
_VLLM_REASONS = {"stop": "stop", "length": "length", "error": "error"}
_VLLM_ABORT = "abort"


def families(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """Every family once, with a sample for each worker that reports it. An unknown value has no sample."""
    yield _gauge(
        "zmqengine_up", "Whether the worker answered.", snapshots, lambda s: float(s.status is not None)
    )
    yield _gauge("zmqengine_ready", "Whether the worker takes requests.", snapshots, _ready)
    yield _states(snapshots)
    yield _info(snapshots)
    yield _gauge("zmqengine_uptime_seconds", "Since the worker was started.", snapshots, _uptime_s)
    yield _gauge("zmqengine_pass_age_seconds", "Age of the present pass of the loop.", snapshots, _pass_age_s)
    for plain in table.GAUGES:
        yield _plain(GaugeMetricFamily, plain, snapshots, OURS)
    for plain in table.COUNTERS:
        yield _plain(CounterMetricFamily, plain, snapshots, OURS)
    for labelled in table.LABELLED_GAUGES:
        yield _labelled(GaugeMetricFamily, labelled, snapshots)
    for labelled in table.LABELLED_COUNTERS:
        yield _labelled(CounterMetricFamily, labelled, snapshots)
    yield _by(GaugeMetricFamily, "zmqengine_memory_bytes", "Memory by purpose.", "part",
              snapshots, lambda s: s.memory)  # fmt: skip
    yield _gauge("zmqengine_memory_limit_bytes", "Limit on the sum of all parts.", snapshots, _memory_limit)
    yield _gauge("zmqengine_sessions_lagging", "Front-ends that are behind.", snapshots, _lagging)
    yield _by(CounterMetricFamily, "zmqengine_requests_ended", "Requests that ended, by cause.", "cause",
              snapshots, lambda s: s.ended)  # fmt: skip
    for distribution in table.DISTRIBUTIONS:
        yield _distribution(distribution, snapshots, OURS)
    yield from _vllm(snapshots)


def model_families(models: Sequence[ModelEntry]) -> Iterator[Metric]:
    """The families of a launcher's models, loaded or not."""
    labels = ("model_name",)
    states = StateSetMetricFamily("zmqengine_model_state", "The state of a model.", labels=labels)
    for model in models:
        states.add_metric((model.name,), {state: state == model.state for state in get_args(ModelState)})
    yield states
    for name, help_text, value in (
        ("zmqengine_model_need_bytes", "Memory that a model takes when it is loaded.", "need_bytes"),
        ("zmqengine_model_waiting", "Requests that wait for a model to be loaded.", "waiting"),
        ("zmqengine_model_load_seconds", "Time of the last load.", "load_s"),
    ):
        gauge = GaugeMetricFamily(name, help_text, labels=labels)
        for model in models:
            gauge.add_metric((model.name,), float(getattr(model, value)))
        yield gauge
    loads = CounterMetricFamily("zmqengine_model_loads", "Times that a model was loaded.", labels=labels)
    for model in models:
        loads.add_metric((model.name,), model.loads)
    yield loads


def _vllm(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    for plain in table.VLLM_GAUGES:
        yield _plain(GaugeMetricFamily, plain, snapshots, VLLM)
    for plain in table.VLLM_COUNTERS:
        yield _plain(CounterMetricFamily, plain, snapshots, VLLM)
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Reserved share of the KV cache, 0 to 1, by vLLM's name.", labels=VLLM
    )
    success = CounterMetricFamily(
        "vllm:request_success", "Requests that ended, by vLLM's name.", labels=(*VLLM, "finished_reason")
    )
    for snapshot in snapshots:
        used, most = snapshot.number("kv_projected_bytes"), snapshot.number("kv_bytes_max")
        if used is not None and most:
            usage.add_metric(_labels(snapshot), used / most)
        reasons: dict[str, float] = {}
        for finish, count in snapshot.ended.items():
            reason = _VLLM_REASONS.get(finish, _VLLM_ABORT)
            reasons[reason] = reasons.get(reason, 0) + count
        for reason, count in sorted(reasons.items()):
            success.add_metric([*_labels(snapshot), reason], count)
    yield usage
    yield success
    for distribution in table.VLLM_DISTRIBUTIONS:
        yield _distribution(distribution, snapshots, VLLM)


def _labels(snapshot: Snapshot) -> list[str]:
    return [snapshot.model, snapshot.worker]


def _gauge(
    name: str, help_: str, snapshots: Iterable[Snapshot], read: Callable[[Snapshot], float | None]
) -> Metric:
    family = GaugeMetricFamily(name, help_, labels=OURS)
    for snapshot in snapshots:
        value = read(snapshot)
        if value is not None:
            family.add_metric(_labels(snapshot), value)
    return family


def _plain(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    row: table.Plain,
    snapshots: Iterable[Snapshot],
    labels: Sequence[str],
) -> Metric:
    family = kind(row.name, row.help, labels=labels)
    for snapshot in snapshots:
        value = snapshot.number(row.number)
        if value is not None:
            more = snapshot.number(row.plus) if row.plus else 0
            family.add_metric(_labels(snapshot), value + (more or 0))
    return family


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    row: table.ByLabel,
    snapshots: Iterable[Snapshot],
) -> Metric:
    def read(snapshot: Snapshot) -> dict[str, float]:
        values = {value: snapshot.number(number) for value, number in row.numbers.items()}
        return {value: number for value, number in values.items() if number is not None}

    return _by(kind, row.name, row.help, row.label, snapshots, read)


def _by(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_: str,
    label: str,
    snapshots: Iterable[Snapshot],
    read: Callable[[Snapshot], dict[str, float] | dict[str, int]],
) -> Metric:
    family = kind(name, help_, labels=(*OURS, label))
    for snapshot in snapshots:
        for value, number in sorted(read(snapshot).items()):
            family.add_metric([*_labels(snapshot), value], number)
    return family


def _distribution(row: table.Distribution, snapshots: Iterable[Snapshot], labels: Sequence[str]) -> Metric:
    family = HistogramMetricFamily(row.name, row.help, labels=labels)
    for snapshot in snapshots:
        histogram = snapshot.histogram(row.histogram)
        if histogram is not None:
            bounds = [
                *(f"{bound:g}" if bound < 1e6 else f"{bound:.0f}" for bound in histogram.bounds),
                "+Inf",
            ]
            buckets = list(zip(bounds, accumulate(map(float, histogram.counts)), strict=False))
            family.add_metric(_labels(snapshot), buckets=buckets, sum_value=histogram.sum)
    return family


def _states(snapshots: Iterable[Snapshot]) -> Metric:
    family = StateSetMetricFamily("zmqengine_worker_state", "State of the worker.", labels=OURS)
    for snapshot in snapshots:
        now = snapshot.status.state if snapshot.status is not None else None
        family.add_metric(
            _labels(snapshot), {state: state == now for state in get_args(messages.WorkerState)}
        )
    return family


def _info(snapshots: Iterable[Snapshot]) -> Metric:
    family = GaugeMetricFamily(
        "zmqengine_worker_info", "1, with the version of the worker.", labels=(*OURS, "version")
    )
    for snapshot in snapshots:
        if snapshot.description is not None:
            family.add_metric([*_labels(snapshot), snapshot.description.version], 1)
    return family


def _ready(snapshot: Snapshot) -> float:
    return float(snapshot.status is not None and snapshot.status.state == "ready")


def _uptime_s(snapshot: Snapshot) -> float | None:
    return None if snapshot.status is None else snapshot.status.uptime_s


def _pass_age_s(snapshot: Snapshot) -> float | None:
    return None if snapshot.status is None else snapshot.status.pass_age_ms / 1000


def _memory_limit(snapshot: Snapshot) -> float | None:
    return snapshot.memory_limit


def _lagging(snapshot: Snapshot) -> float | None:
    if snapshot.status is None:
        return None
    if not snapshot.status.sessions and snapshot.number("sessions"):
        # Only an operator's key may list sessions.
        return None
    return sum(session.lagging for session in snapshot.status.sessions)
