"""A collector in a process of its own: prints each span that comes over OTLP/HTTP as a line of JSON.

python otlp_receiver.py      prints its port first
"""

from __future__ import annotations

import gzip
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        sent = ExportTraceServiceRequest.FromString(data)
        for resource in sent.resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            for span in (each for scope in resource.scope_spans for each in scope.spans):
                attributes = {each.key: each.value.string_value or each.value.int_value for each in span.attributes}
                print(
                    json.dumps(
                        {
                            "path": self.path,
                            "service": service,
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "ns": span.end_time_unix_nano - span.start_time_unix_nano,
                            "status": span.status.code,
                            "attributes": attributes,
                        }
                    ),
                    flush=True,
                )
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    print(server.server_port, flush=True)
    server.serve_forever()
