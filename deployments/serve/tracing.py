"""Sends the spans of requests to a collector over OTLP, if OpenTelemetry's environment variables configure one.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or `..._TRACES_ENDPOINT`) enables tracing. OpenTelemetry's SDK reads the variables for
headers, certificates, the sampler and the service name. It sends spans from its own thread, and drops them if the
collector is too slow.
"""

from __future__ import annotations

import logging
import os
import random
from importlib import import_module
from typing import Any, cast

from app.api.request_trace import RequestTrace, Tracer
from app.errors import described

logger = logging.getLogger(__name__)

_EXPORTERS = {  # by protocol; the exporter for gRPC is a separate package
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def tracer_of_environment() -> Tracer | None:
    """Return the tracer that the environment configures, or None. Logs a warning if OpenTelemetry is not installed."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not any(os.environ.get(name) for name in endpoints) or os.environ.get("OTEL_SDK_DISABLED", "") == "true":
        return None
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    try:
        return OtlpTracer()
    except ImportError as error:
        logger.warning("traces will not be sent: %s; install carousel[tracing]", described(error))
        return None


class OtlpTracer:
    """Converts traces of requests to spans of OpenTelemetry's SDK, which batches and sends them."""

    def __init__(self) -> None:
        """Raises ImportError if the exporter for the protocol is not installed."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        service_name = "carousel"
        resource = Resource.create({} if is_named else {"service.name": service_name})
        self._ids = _Ids()
        # The process-wide provider may be Ray's, so this tracer uses its own.
        self._provider = TracerProvider(resource=resource, id_generator=cast(Any, self._ids))
        self._provider.add_span_processor(BatchSpanProcessor(_exporter()))
        self._tracer = self._provider.get_tracer("carousel")
        self._parent_of = TraceContextTextMapPropagator().extract
        self._api: Any = trace

    def record(self, trace: RequestTrace) -> None:
        """Create the spans of an ended request. Logs errors, because a request must not fail because of its trace."""
        try:
            self._record(trace)
        except Exception as error:
            logger.warning("a trace was not sent: %s", described(error))

    def _record(self, trace: RequestTrace) -> None:
        api = self._api
        self._ids.of_next_trace = trace.trace_id
        root = self._tracer.start_span(
            trace.name,
            context=self._parent_of(trace.parent),
            kind=api.SpanKind.SERVER if trace.trace_id is None else api.SpanKind.CONSUMER,
            start_time=trace.began_ns,
            attributes=trace.attributes,
        )
        if root.is_recording():
            within = api.set_span_in_context(root)
            for span in trace.spans():
                child = self._tracer.start_span(
                    span.name, context=within, start_time=span.began_ns, attributes=span.attributes
                )
                child.end(span.ended_ns)
            if trace.error is not None:
                root.set_attribute("error.type", type(trace.error).__name__)
                root.set_status(api.StatusCode.ERROR, described(trace.error))
        root.end(trace.ended_ns)

    def close(self) -> None:
        """Send all remaining spans and stop the SDK's thread."""
        self._provider.shutdown()


class _Ids:
    """An `IdGenerator` for the SDK. Ids are random unless `of_next_trace` is set."""

    def __init__(self) -> None:
        self.of_next_trace: int | None = None

    def generate_span_id(self) -> int:
        return random.randrange(1, 2**64)

    def generate_trace_id(self) -> int:
        return self.of_next_trace or random.randrange(1, 2**128)

    def is_trace_id_random(self) -> bool:
        return True  # given trace ids are hashes, which are random enough for samplers


def _exporter() -> Any:
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in protocols if name in os.environ), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ImportError(f"there is no exporter for the protocol {protocol[:40]!r}; use http/protobuf or grpc")
    return import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
