"""Traces of requests, as a collector receives them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import chat, get, post, serving
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.serving.tracing import open_traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP; `spans` are what came, by name."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> dict[str, Any]:
        """The last span of each name."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = {}
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found.update({span.name: span for span in scope.spans})
        return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Where this test's traces go."""
    pytest.importorskip("opentelemetry.sdk")
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield collector
    collector.close()


def test_a_request_is_a_span_of_the_callers_trace_with_its_phases_in_the_worker(collector: Collector) -> None:
    """Their lengths are told by the worker; counts are there, and no text."""
    worker = FakeWorker(FakeEngineConfig(step_ms=30), process=True)
    with worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200, tracing=True)) as front:
        body = chat("a secret word", max_tokens=5, ignore_eos=True)
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert post(front, "/v1/chat/completions", body, **header).status == 200
        assert get(front, "/v1/models/none").status == 404
    spans = collector.spans
    whole = spans["POST /v1/chat/completions"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    facts = {pair.key: pair.value for pair in whole.attributes}
    assert facts["http.response.status_code"].int_value == 200
    assert facts["gen_ai.usage.output_tokens"].int_value == 5
    assert facts["gen_ai.request.model"].string_value == "fake"
    phases = [spans[f"worker {name}"] for name in ("prefill", "decode")]
    for phase in phases:
        assert (phase.trace_id, phase.parent_span_id) == (whole.trace_id, whole.span_id)
        assert whole.start_time_unix_nano <= phase.start_time_unix_nano <= phase.end_time_unix_nano
        assert phase.end_time_unix_nano <= whole.end_time_unix_nano
    # Five tokens: the four after the first take a step each.
    assert phases[1].end_time_unix_nano - phases[1].start_time_unix_nano >= 4 * 30e6
    missing = spans["GET /v1/models/{id:path}"]
    assert missing.trace_id.hex() != TRACE
    assert not any(b"secret" in body for body in collector.bodies)


def test_nothing_is_traced_unless_asked_for(collector: Collector) -> None:
    """Off by default, whatever the environment says."""
    assert open_traces(HttpConfig().tracing) is None
    worker = FakeWorker(FakeEngineConfig())
    with worker, serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        assert post(front, "/v1/chat/completions", chat(max_tokens=2)).status == 200
    assert collector.bodies == []
