"""OpenTelemetry traces of requests, off by default.

A request is one span of this front-end, in the trace named by its `traceparent` header, with a child span for
each phase in the worker: queue, prefill, decode. The worker reports their durations with the end of the
request, and their start times on this front-end's clock follow from that end. OpenTelemetry's own variables
say where traces go and how many: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and
others. No span holds text of a user.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from zmqengine_client.errors import ConfigError
from zmqengine_http.serving.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

_PHASES = ("queue_ms", "prefill_ms", "decode_ms")
_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "zmqengine.cached_tokens",
    "completion": "gen_ai.response.id",
    "error": "error.type",
}
"""Facts of a request to attribute names of OpenTelemetry's semantic conventions for generative AI."""


class Traces:
    """Records requests as spans through the exporters of `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("zmqengine_http")

    def record(self, exchange: Exchange, path: str, seconds: float) -> None:
        """Record a request that took `seconds` and ended now, with its phases.

        Spans are made after the fact, so tracing costs nothing while tokens flow. Never waits for a
        collector.
        """
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        headers = {name: exchange.header(name.encode()) or "" for name in ("traceparent", "tracestate")}
        ended_ns = time.time_ns()
        method = str(exchange.scope["method"])
        span = self._tracer.start_span(
            f"{method} {path or 'unknown'}",
            context=extract({name: value for name, value in headers.items() if value}),
            kind=trace.SpanKind.SERVER,
            start_time=ended_ns - int(seconds * 1e9),
            attributes={
                "http.request.method": method,
                "http.route": path,
                "http.response.status_code": exchange.status,
                "zmqengine.request_id": exchange.id,
            },
        )
        for fact, name in _ATTRIBUTES.items():
            value = exchange.facts.get(fact)
            if isinstance(value, (str, int, float)):
                span.set_attribute(name, value)
        if exchange.status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        self._record_phases(exchange, trace.set_span_in_context(span), ended_ns)
        span.end(ended_ns)

    def close(self) -> None:
        """Flush the spans and stop the exporter's thread."""
        self._provider.shutdown()

    def _record_phases(self, exchange: Exchange, context: Context, ended_ns: int) -> None:
        times_ms = [exchange.facts.get(phase) for phase in _PHASES]
        spans_ns = [int(ms * 1e6) if isinstance(ms, (int, float)) else 0 for ms in times_ms]
        begins_ns = ended_ns - sum(spans_ns)
        for phase, span_ns in zip(_PHASES, spans_ns, strict=True):
            if span_ns:
                child = self._tracer.start_span(
                    f"worker {phase.removesuffix('_ms')}",
                    context=context,
                    start_time=begins_ns,
                )
                begins_ns += span_ns
                child.end(begins_ns)


def open_traces(wanted: bool) -> Traces | None:
    """Traces if they are wanted. Raises `ConfigError` if OpenTelemetry is wanted and not installed."""
    if not wanted:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"{error}: for traces, pip install 'zmqengine[tracing]'") from None
    name = os.environ.get("OTEL_SERVICE_NAME", "zmqengine http")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
