"""The dashboard and the alerts ask for metrics that exist, in words that Prometheus understands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tests.metrics.test_families import DESCRIPTION, STATUS
from zmqengine.protocol.messages import Histogram
from zmqengine_http.serving.meter import Meter
from zmqengine_metrics import table
from zmqengine_metrics.families import families
from zmqengine_metrics.snapshot import Snapshot

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "zmqengine.json").read_text())
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
EVERYTHING = (
    *table.GAUGES, *table.COUNTERS, *table.VLLM_GAUGES, *table.VLLM_COUNTERS,
)  # fmt: skip


class _Full(Collector):
    """A worker that tells every number of the table."""

    def collect(self) -> list[Metric]:
        numbers = {plain.number: 1.0 for plain in EVERYTHING}
        for labelled in (*table.LABELLED_GAUGES, *table.LABELLED_COUNTERS):
            numbers |= dict.fromkeys(labelled.numbers.values(), 1.0)
        histograms = {row.histogram: Histogram([1.0], [1, 1], 3.0) for row in table.DISTRIBUTIONS}
        status = type(STATUS)(
            **{name: getattr(STATUS, name) for name in STATUS.__struct_fields__}
            | {"numbers": {**numbers, "ended_stop": 1}, "histograms": histograms}
        )
        return list(families([Snapshot("w", DESCRIPTION, status)]))


def exposed() -> set[str]:
    """The name of every sample that a front-end's /metrics can have."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Full())
    meter = Meter()
    meter.began("/")
    meter.ended("/", 200, 0.1)
    text = generate_latest(registry).decode() + generate_latest(meter.registry).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def expressions() -> list[str]:
    """Of every panel, the annotations and the alerts."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    found += [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
    found += [
        rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    return found


def plain(expression: str) -> str:
    """With Grafana's variables filled in."""
    return expression.replace("$__rate_interval", "1m").replace("$worker", ".*")


@pytest.mark.process
@pytest.mark.parametrize("expression", expressions())
def test_an_expression_parses_and_names_metrics_that_exist(expression: str) -> None:
    """A panel of a metric that was renamed would be empty for ever."""
    bare = re.sub(r"\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]", "", plain(expression))
    names = set(re.findall(r"\b(?:zmqengine|vllm)[a-z_:]+", bare))
    assert names
    assert names <= exposed()
    pytest.importorskip("promql_parser").parse(plain(expression))


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_labels_that_its_metrics_have(expression: str) -> None:
    """By or within braces."""
    words = set(re.findall(r"by \(([^)]*)\)", expression))
    named = {label.strip() for labels in words for label in labels.split(",")}
    named |= set(re.findall(r"[{,]([a-z_]+)=", expression))
    assert named <= {"worker", "model_name", "le", "kind", "part", "cause", "path", "status", "tier", "phase"}


def test_panels_have_a_place_of_their_own() -> None:
    """24 columns, and nothing on top of anything else."""
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not taken & cells, panel["title"]
        taken |= cells


@pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed")
def test_prometheus_itself_takes_the_files() -> None:
    """`promtool check`."""
    for command in (
        ["promtool", "check", "rules", str(ALERTS)],
        ["promtool", "check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yml")],
    ):
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
