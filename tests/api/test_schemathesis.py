"""Requests made up from the published description, by a client that we did not write: right ones and wrong ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from app.api.endpoints import live
from app.api.endpoints.table import ENDPOINTS
from app.text import Tokenizer
from tests.kit.service import Service, say, served
from tests.waiting import PATIENCE_S, eventually

EXAMPLES = 8  # of each mode, for each of the operations
# Not among them: that everything which fits the description is answered with a 2xx. What a model or a compiler has to
# look at (token ids, grammars, dimensions, a context length) no description can say.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def url(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Everything there is, files and batches too, over HTTP."""
    service = Service(tokenizer, say(tokenizer, "3 4 5."))
    started: list[uvicorn.Server] = []
    monkeypatch = pytest.MonkeyPatch()

    async def serve() -> None:
        async with served(service, tmp_path_factory.mktemp("batches")) as app:
            server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="critical"))
            started.append(server)
            await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    monkeypatch.setattr(live, "STREAM_S", 0.05)  # of the live view
    thread.start()
    eventually(lambda: started and started[0].started, every_s=0.005)
    try:
        yield f"http://127.0.0.1:{started[0].servers[0].sockets[0].getsockname()[1]}"
    finally:
        started[0].should_exit = True
        thread.join(PATIENCE_S)
        monkeypatch.undo()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_the_service_does_what_its_description_says(url: str, mode: GenerationMode) -> None:
    description = openapi.from_url(f"{url}/openapi.json")
    rejected = description.config.checks.negative_data_rejection
    rejected.expected_statuses = [*rejected.expected_statuses, "413"]  # some wrong bodies are over 4 MiB
    num_operations = num_cases = 0
    for found in description.get_all_operations():
        operation = found.ok()
        num_operations += 1
        if mode is GenerationMode.NEGATIVE and not operation.body:  # any text is an id, and any number a page's length
            continue

        @settings(
            max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers_as_described(case: schemathesis.Case) -> None:
            nonlocal num_cases
            num_cases += 1
            case.call_and_validate(checks=CHECKS)

        answers_as_described()
    num_others = 43
    assert num_operations == num_others + sum(1 + len(endpoint.aliases) for endpoint in ENDPOINTS.values())
    assert num_cases >= 100
