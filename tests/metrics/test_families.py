"""A worker's status as Prometheus reads it: names, kinds, labels and values."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("mlx.core", reason="a worker needs it; a front-end runs without")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.predictions import Predictions
from zmqengine.protocol.messages import Description, Histogram, ModelCard, Progress, SessionInfo, Status
from zmqengine_metrics import table
from zmqengine_metrics.families import families
from zmqengine_metrics.snapshot import Snapshot

CARD = ModelCard("m", 1000, 4096, [0], "hash", 0)
DESCRIPTION = Description(
    call=0, protocol=(1, 1), version="1.2", name="w", pid=1, epoch=bytes(8), state="ready",
    progress=Progress("ready"), cmd="", out="", model=CARD,
)  # fmt: skip
STATUS = Status(
    call=0,
    epoch=bytes(8),
    state="ready",
    uptime_s=12.5,
    pass_age_ms=250.0,
    numbers={
        "running": 3, "queued": 2, "sessions": 2, "prompt_tokens": 100, "cached_tokens": 28, "generated_tokens": 77,
        "prompt_cache_memory_hit_tokens": 18, "prompt_cache_disk_hit_tokens": 10,
        "tokens_read_again": 5, "parked": 4, "kv_projected_bytes": 25, "kv_bytes_max": 100, "restarts": 1,
        "ended_stop": 6, "ended_length": 3, "ended_abort": 1, "ended_deadline": 2, "ended_error": 1,
    },
    facts={},
    memory={"weights": 1000, "kv": 20, "limit": 5000},
    histograms={"time_to_first_token_s": Histogram([0.1, 0.5, 1.0], [2, 0, 3, 1], 4.75)},
    sessions=[SessionInfo("a", lagging=True), SessionInfo("b")],
)  # fmt: skip


class _Given(Collector):
    def __init__(self, *snapshots: Snapshot) -> None:
        self.snapshots = snapshots

    def collect(self) -> list[Metric]:
        return list(families(self.snapshots))


def scrape(*snapshots: Snapshot) -> dict[str, Metric]:
    """Through the text that a scraper gets, by family."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(*snapshots))
    text = generate_latest(registry).decode()
    found = list(text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    """Samples of a family by the values of these labels."""
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in family.samples}


def test_every_number_comes_out_as_it_went_in() -> None:
    """Gauges, counters and labels of a status whose every value is known."""
    found = scrape(Snapshot("w", DESCRIPTION, STATUS))
    one = ("model_name", "worker")
    assert values(found["zmqengine_requests_running"], *one) == {("m", "w"): 3}
    assert values(found["zmqengine_requests_waiting"], *one) == {("m", "w"): 2}
    assert values(found["zmqengine_pass_age_seconds"], *one) == {("m", "w"): 0.25}
    assert values(found["zmqengine_worker_restarts"], *one) == {("m", "w"): 1}
    assert values(found["zmqengine_sessions_lagging"], *one) == {("m", "w"): 1}
    assert values(found["zmqengine_memory_bytes"], "part") == {("weights",): 1000, ("kv",): 20}
    assert values(found["zmqengine_memory_limit_bytes"], *one) == {("m", "w"): 5000}
    assert values(found["zmqengine_tokens"], "kind") == {
        ("prompt",): 100, ("cached",): 28, ("read_again",): 5, ("generated",): 77,
    }  # fmt: skip
    assert values(found["zmqengine_prompt_cache_hit_tokens"], "tier") == {
        ("memory",): 18, ("disk",): 10,
    }  # fmt: skip
    assert values(found["zmqengine_requests_ended"], "cause") == {
        ("stop",): 6, ("length",): 3, ("abort",): 1, ("deadline",): 2, ("error",): 1,
    }  # fmt: skip
    states = values(found["zmqengine_worker_state"], "zmqengine_worker_state")
    assert states == {
        ("loading",): 0, ("warming",): 0, ("ready",): 1, ("draining",): 0, ("failed",): 0,
    }  # fmt: skip
    assert values(found["zmqengine_worker_info"], "version") == {("1.2",): 1}


def test_a_histogram_is_cumulative_with_count_and_sum() -> None:
    """As `histogram_quantile` wants it."""
    for name, labels in (
        ("zmqengine_time_to_first_token_seconds", {"model_name": "m", "worker": "w"}),
        ("vllm:time_to_first_token_seconds", {"model_name": "m", "engine": "w"}),
    ):
        family = scrape(Snapshot("w", DESCRIPTION, STATUS))[name]
        samples = [(sample.name.removeprefix(name), sample.labels, sample.value) for sample in family.samples]
        assert samples == [
            ("_bucket", labels | {"le": "0.1"}, 2),
            ("_bucket", labels | {"le": "0.5"}, 2),
            ("_bucket", labels | {"le": "1"}, 5),
            ("_bucket", labels | {"le": "+Inf"}, 6),
            ("_count", labels, 6),
            ("_sum", labels, 4.75),
        ]


def test_vllms_names_carry_vllms_meaning() -> None:
    """Prompt tokens with those from the cache, a share from 0 to 1, three reasons."""
    found = scrape(Snapshot("w", DESCRIPTION, STATUS))
    one = ("model_name", "engine")
    assert values(found["vllm:prompt_tokens"], *one) == {("m", "w"): 128}
    assert values(found["vllm:prefix_cache_queries"], *one) == {("m", "w"): 128}
    assert values(found["vllm:prefix_cache_hits"], *one) == {("m", "w"): 28}
    assert values(found["vllm:generation_tokens"], *one) == {("m", "w"): 77}
    assert values(found["vllm:kv_cache_usage_perc"], *one) == {("m", "w"): 0.25}
    assert values(found["vllm:num_preemptions"], *one) == {("m", "w"): 4}
    assert values(found["vllm:request_success"], "finished_reason") == {
        ("stop",): 6, ("length",): 3, ("abort",): 3, ("error",): 1,
    }  # fmt: skip


def test_workers_stand_side_by_side_and_a_silent_one_is_down() -> None:
    """One family each, whatever is known; what is unknown is absent and not 0."""
    found = scrape(Snapshot("w", DESCRIPTION, STATUS), Snapshot("gone"))
    assert values(found["zmqengine_up"], "worker") == {("w",): 1, ("gone",): 0}
    assert values(found["zmqengine_ready"], "worker") == {("w",): 1, ("gone",): 0}
    assert values(found["zmqengine_requests_running"], "worker") == {("w",): 3}
    silent = scrape(Snapshot("w", model_before="m"))
    assert values(silent["zmqengine_up"], "model_name", "worker") == {("m", "w"): 0}


def test_a_front_end_that_may_not_see_sessions_does_not_call_them_well() -> None:
    """With keys only an operator gets the list: none is told, not none lagging."""
    hidden = Status(0, bytes(8), "ready", 1.0, 1.0, {"sessions": 4}, {})
    assert not scrape(Snapshot("w", DESCRIPTION, hidden))["zmqengine_sessions_lagging"].samples


@pytest.mark.parametrize(
    "name", sorted({row.name for row in (*table.DISTRIBUTIONS, *table.GAUGES, *table.COUNTERS)})
)
def test_names_end_in_base_units(name: str) -> None:
    """Seconds and bytes, no abbreviations: https://prometheus.io/docs/practices/naming/."""
    assert not name.endswith(("_s", "_ms", "_us", "_mb", "_total"))


def test_every_source_of_drafts_is_counted() -> None:
    """What each of them proposed, and what of it was accepted."""
    sources = {source.name for source in (DraftModel, ForcedRuns, Ngrams, Predictions)}
    numbers = STATUS.numbers | dict.fromkeys(
        [f"{what}_{source}" for what in ("drafted", "drafts_accepted") for source in sources], 7
    )
    found = scrape(Snapshot("w", DESCRIPTION, msgspec.structs.replace(STATUS, numbers=numbers)))
    for name in ("zmqengine_drafted_tokens", "zmqengine_drafted_tokens_accepted"):
        assert values(found[name], "source") == dict.fromkeys([(source,) for source in sources], 7)
