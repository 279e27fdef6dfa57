"""Files and batches over HTTP: the real `openai` package, and requests that no honest client sends."""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from app.api.endpoints import files
from app.api.http.multipart import MIN_BYTES_PER_S
from app.api.http.openapi import openapi_document
from app.api.prepared_request import RequestLimits
from app.batches import BatchLimits
from app.config import ApiConfig
from app.engine.request import FinishReason, Pooling, Request, TokenDelta, TokenLogprobs
from app.text import Tokenizer
from tests.kit.engine import FakeClock
from tests.kit.service import (
    CASCADE,
    ENDED,
    Service,
    bearer,
    entry,
    http_client,
    line_of,
    openai_batches,
    sent_batch,
    without_times,
)
from tests.stalls import slowness, stalls_of_loop
from tests.waiting import until

CHAT = "/v1/chat/completions"


def chat_line(custom_id: str, **fields: Any) -> bytes:
    return line_of(custom_id, CHAT, **{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields})


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch once it has ended."""
    return await until(lambda: client.batches.retrieve(batch_id), lambda batch: batch.status in ENDED)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by custom id, each there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in (await client.files.content(file_id)).content.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


async def test_the_openai_package_drives_a_whole_batch(service: Service, tmp_path: Path) -> None:
    async with openai_batches(service, tmp_path) as client:
        content = b"".join(chat_line(f"line-{n}", max_tokens=8) for n in range(20)) + chat_line("bad", temperature=9)
        file = await client.files.create(
            file=("mine.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert file.expires_at == file.created_at + 3600
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(content), "mine.jsonl", "batch", "processed",
        )  # fmt: skip
        assert (await client.files.content(file.id)).content == content

        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "first"}
        )
        assert batch.status == "validating"
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.metadata == {"night": "first"}
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
        assert batch.usage is not None
        assert batch.usage.output_tokens == 20 * 5
        assert batch.model == "demo"
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at  # type: ignore[operator]

        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
        assert output.keys() == {f"line-{n}" for n in range(20)}
        response = output["line-3"]["response"]
        assert (response["status_code"], response["request_id"]) == (200, f"{batch.id}-3")
        assert response["body"]["id"].startswith(f"chatcmpl-{batch.id}-3-")
        assert response["body"]["choices"][0]["message"]["content"] == "3 4 5."
        assert errors.keys() == {"bad"}
        assert errors["bad"]["response"]["status_code"] == 400
        assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"

        assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
        assert {each.purpose async for each in client.files.list()} == {"batch", "batch_output"}
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
    assert {request.priority for request in service.generate.requests} == {100}


async def test_a_batch_has_all_that_is_published(service: Service, tmp_path: Path) -> None:
    schema = openapi_document(ApiConfig(), RequestLimits(), has_batches=True)["components"]["schemas"]["Batch"]
    async with http_client(service, tmp_path) as client:
        batch = (await client.post("/v1/batches", json=await sent_batch(client, chat_line("a")))).json()
    assert set(schema["required"]) <= batch.keys()
    assert {"model", "paused", "webhook"} <= set(schema["required"])


def names_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def send(client: httpx.AsyncClient, content: bytes = b"{}\n", name: str = "a.jsonl", **fields: str) -> Any:
    return await client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"} | fields)


def form(*parts: bytes, end: bytes = b"--edge--\r\n") -> dict[str, Any]:
    """A body made by hand."""
    body = b"".join(b"--edge\r\n" + part + b"\r\n" for part in parts) + end
    return {"content": body, "headers": {"content-type": "multipart/form-data; boundary=edge"}}


FILE_PART = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}'
PURPOSE_PART = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'


async def test_a_form_may_have_its_parts_in_any_order(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        for parts in ((FILE_PART, PURPOSE_PART), (PURPOSE_PART, FILE_PART)):
            response = await client.post("/v1/files", **form(*parts))
            assert (response.status_code, response.json()["bytes"]) == (200, 2), response.text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("/etc/shadow", "shadow"),
        ("C:\\temp\\..\\boot.ini", "boot.ini"),
        ("..", None),
        ("nul\0.jsonl", None),
        ("x" * 4096, None),
        ("", None),
        ("\u202egpj.exe", None),
        ("día.jsonl", "día.jsonl"),
        ("batches.sqlite3", "batches.sqlite3"),
    ],
)
async def test_a_clients_name_is_for_show_only(service: Service, tmp_path: Path, name: str, shown: str | None) -> None:
    async with http_client(service, tmp_path / "folder") as client:
        before = names_below(tmp_path)
        disposition = b'Content-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\n{}'
        response = await client.post("/v1/files", **form(disposition, PURPOSE_PART))
        if shown is None:
            assert response.status_code == 400
            assert names_below(tmp_path) == before
        else:
            assert response.json()["filename"] == shown
            assert names_below(tmp_path) - before == {response.json()["id"]}
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("file_id", ["file-..%2f..%2fx", "..%2fbatches.sqlite3", "%2e%2e", "file-%00", "x" * 5000])
async def test_an_id_that_is_none_is_not_found(service: Service, tmp_path: Path, file_id: str) -> None:
    async with http_client(service, tmp_path) as client:
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{file_id}"),
            ("POST", f"/v1/batches/{file_id}/cancel"),
        ):
            response = await client.request(method, path)
            assert response.status_code == 404, (method, path)
            assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"content": b"{}", "headers": {"content-type": "application/json"}}, "multipart/form-data with a boundary"),
        ({"content": b"{}", "headers": {"content-type": "multipart/form-data"}}, "with a boundary"),
        (form(PURPOSE_PART), "the form has no file"),
        (form(FILE_PART, PURPOSE_PART, end=b""), "ends before its last boundary"),
        (form(FILE_PART, PURPOSE_PART, end=b"--edge"), "ends before its last boundary"),
        (form(FILE_PART, FILE_PART, PURPOSE_PART), "two parts named 'file'"),
        (form(FILE_PART, PURPOSE_PART, PURPOSE_PART), "two parts named 'purpose'"),
        (form(PURPOSE_PART, b'Content-Disposition: form-data; name="file"\r\n\r\n{}'), "no filename"),
        (form(b"Content-Disposition: form-data\r\n\r\nx"), "without a name"),
        (form(b"X: y\r\n\r\nx"), "without a name"),
        (form(b"X" * 10_000 + b": y\r\n\r\nx"), "header size"),
        (form(b"X: y\r\n" * 1000 + b"\r\nx"), "header count"),
        (form(*[b'Content-Disposition: form-data; name="n%d"\r\n\r\n' % n for n in range(100_000)]), "than 16 parts"),
        (form(b'Content-Disposition: form-data; name="big"\r\n\r\n' + b"x" * 5000), "more than 4,096 bytes"),
        (form(FILE_PART), "`purpose` should be 'batch'"),
        (form(FILE_PART, PURPOSE_PART.replace(b"batch", b"vision")), "got 'vision'"),
        (
            form(FILE_PART, PURPOSE_PART, b'Content-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n7'),
            "anchor",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_form_that_is_none_leaves_nothing(
    service: Service, tmp_path: Path, request_: dict[str, Any], message: str
) -> None:
    async with http_client(service, tmp_path) as client:
        response = await client.post("/v1/files", **request_)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
        assert (await client.get("/v1/files")).json()["data"] == []
        assert not list((tmp_path / "drafts").iterdir())


async def test_a_file_may_have_so_many_bytes_and_not_one_more(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.endpoints.files.MAX_FILE_BYTES", 1000)
    async with http_client(service, tmp_path, batch_limits=BatchLimits(max_file_bytes=1000)) as client:
        assert (await send(client, b"x" * 1000)).status_code == 200
        refused = await send(client, b"x" * 1001)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")

        async def endless() -> AsyncIterator[bytes]:
            yield b"--edge\r\n" + FILE_PART
            while True:
                yield b"x" * 65536

        headers = {"content-type": "multipart/form-data; boundary=edge"}
        assert (await client.post("/v1/files", content=endless(), headers=headers)).status_code == 413
        headers["content-length"] = "9" * 30
        assert (await client.post("/v1/files", content=b"", headers=headers)).status_code == 413


@pytest.mark.parametrize("pause_s", [math.inf, 0.02], ids=["silent", "a byte now and then"])
async def test_an_upload_that_is_slow_gives_its_place_back(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    monkeypatch.setattr("app.api.http.multipart.SILENCE_TIMEOUT_S", 0.1)

    async def slow() -> AsyncIterator[bytes]:
        yield b"--edge\r\n" + FILE_PART
        for _ in range(1000):
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), pause_s if pause_s < math.inf else None)
            yield b"x"

    async with http_client(service, tmp_path) as client:
        headers = {"content-type": "multipart/form-data; boundary=edge"}
        response = await client.post("/v1/files", content=slow(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
        assert not list((tmp_path / "drafts").iterdir())


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/files", "multipart/form-data; boundary=edge"), ("/v1/completions", "application/json")]
)
async def test_a_body_that_cannot_be_read_to_its_end_is_a_client_that_has_gone(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, kind: str
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"--edge\r\n" + FILE_PART
        raise RuntimeError("Serve's own proxy gives the error of the call that it cancelled")

    async with http_client(service, tmp_path) as client:
        response = await client.post(path, content=broken(), headers={"content-type": kind})
    assert response.status_code == 499
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(("bytes_per_s", "status"), [(MIN_BYTES_PER_S, 200), (MIN_BYTES_PER_S // 2, 408)])
async def test_an_upload_that_is_fast_enough_may_take_longer_than_a_silence(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_s: int, status: int
) -> None:
    clock, pause_s = FakeClock(), 25.0
    monkeypatch.setattr("app.api.http.multipart.time", SimpleNamespace(monotonic=clock))

    async def steady() -> AsyncIterator[bytes]:
        yield form(PURPOSE_PART, FILE_PART, end=b"")["content"].removesuffix(b"\r\n")
        for _ in range(8):  # longer than SILENCE_TIMEOUT_S together
            clock.advance(pause_s)
            await asyncio.sleep(0)  # a time-out ends a wait only where there is one
            yield b"x" * round(pause_s * bytes_per_s)
        yield b"\r\n--edge--\r\n"

    async with http_client(service, tmp_path) as client:
        headers = {"content-type": "multipart/form-data; boundary=edge"}
        response = await client.post("/v1/files", content=steady(), headers=headers)
        assert response.status_code == status, response.text


async def test_hostile_and_large_uploads_delay_no_other_request(service: Service, tmp_path: Path) -> None:
    hostile = [
        form(b"X: y\r\n\r\n", end=b"\r\n--edg" * 1_000_000),
        form(FILE_PART + b"\r" * 8_000_000),
        form(FILE_PART + b"\r\n--edg" * 1_000_000),
        form(FILE_PART, PURPOSE_PART, end=b"--edge--\r\n" + b"\r\n" * 4_000_000),
        {"content": b"\r\n" * 4_000_000, "headers": {"content-type": "multipart/form-data; boundary=edge"}},
        form(FILE_PART + b"x" * 16_000_000, PURPOSE_PART),
    ]
    async with http_client(service, tmp_path) as client:
        async with stalls_of_loop() as stalls:
            for request in hostile:
                body, headers = request["content"], request["headers"]

                async def pieces(body: bytes = body) -> AsyncIterator[bytes]:
                    for start in range(0, len(body), 1_000_000):
                        yield body[start : start + 1_000_000]

                assert (await client.post("/v1/files", content=pieces(), headers=headers)).status_code in (200, 400)
        assert stalls.longest_s < 0.1 * slowness()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
async def test_a_batch_that_cannot_be_names_the_field(
    service: Service, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with http_client(service, tmp_path) as client:
        response = await client.post("/v1/batches", json=await sent_batch(client, b"{}\n", CHAT) | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert (await client.get("/v1/batches")).json()["data"] == []


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=99999999", "order=up", "after=batch_none"])
async def test_a_page_that_cannot_be(service: Service, tmp_path: Path, query: str) -> None:
    async with http_client(service, tmp_path) as client:
        response = await client.get(f"/v1/batches?{query}")
        assert response.status_code == (404 if "after" in query else 400)
        assert response.json()["error"]["param"] == query.partition("=")[0]


async def test_a_page_of_files_has_a_thousand_at_most_and_says_that_others_follow(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.MAX_FILES_OF_PAGE <= 1000, "more would hold the event loops that they pass"
    monkeypatch.setattr(files, "MAX_FILES_OF_PAGE", 2)
    async with openai_batches(service, tmp_path) as client:
        sent = [(await client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")).id for _ in range(5)]
        for asked in ({}, {"limit": 10_000}, {"limit": 1}):
            page = await client.files.list(**asked)
            assert (len(page.data), page.has_more) == (min(2, asked.get("limit", 2)), True)
            assert [file.id async for file in page] == sent[::-1], "clients ask for the rest"
        with pytest.raises(openai.BadRequestError, match="`limit` should be from 1 to 10,000"):
            await client.files.list(limit=10_001)


async def test_a_file_says_when_it_goes(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        given = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await send(client, **given)).json()
        assert file["expires_at"] == file["created_at"] + 3600
        kept = (await send(client)).json()
        assert kept["expires_at"] == kept["created_at"] + 30 * 86_400


def test_without_batches_there_are_no_such_routes(service: Service) -> None:
    for method, path in (("POST", "/v1/files"), ("GET", "/v1/batches")):
        assert service.call(method, path).error["code"] == "not_found"


async def test_files_and_batches_are_of_the_key_that_sent_them(service: Service, tmp_path: Path) -> None:
    keys = {"ann": "a" * 40, "bob": "b" * 40}
    entries = [entry(key, name) for name, key in keys.items()]
    async with http_client(service, tmp_path, keys=entries) as client:
        assert (await client.get("/v1/files")).status_code == 401
        client.headers.update(bearer(keys["ann"]))
        file = (await send(client, chat_line("one"))).json()
        assert (await client.get(f"/v1/files/{file['id']}")).status_code == 200
        assert (await client.get(f"/v1/files/{file['id']}", headers=bearer(keys["bob"]))).status_code == 404


def ending(request: Request) -> list[TokenDelta]:
    """Two tokens of some likelihood, or the vector that is wanted."""
    if request.pooling is not None:
        vector = struct.pack("<4f", 1.0, 0.0, 0.0, 0.0)
        return [TokenDelta(request.request_id, (), FinishReason.STOP, embedding=vector)]
    told = () if request.sampling.logprobs is None else (TokenLogprobs(-0.9, 1), TokenLogprobs(-0.7, 1))
    return [TokenDelta(request.request_id, (20, 21), FinishReason.LENGTH, logprobs=told)]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"model": "both", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"model": "both", "prompt": ["Hi", "Ho"], "n": 2}),
        ("/v1/responses", {"model": "both", "input": "Hi", "include": ["message.output_text.logprobs"]}),
        ("/v1/embeddings", {"model": "small", "input": ["Hi", [5, 6]], "dimensions": 2}),
    ],
)
async def test_lines_of_every_endpoint_are_answered_as_calls_are(
    tokenizer: Tokenizer, tmp_path: Path, endpoint: str, body: dict[str, Any]
) -> None:
    service = Service(tokenizer, ending, names=("small", "large"), pipelines=[CASCADE], pooling=Pooling.LAST)
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    online = (await service.answer("POST", endpoint, body)).json
    async with openai_batches(service, tmp_path) as client:
        file = await client.files.create(file=("mine.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
        )
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 1)
        answer = (await lines_of(client, done.output_file_id))["a"]["response"]["body"]
        told, expected = answer["usage"], online["usage"]
        if "pipeline" in expected:
            told, expected = without_times(told), without_times(expected)
        assert told == expected
        assert answer["model"] == online["model"] == ("small" if endpoint == "/v1/embeddings" else "large")
        usage = answer["usage"]
        assert done.usage.input_tokens == usage.get("prompt_tokens", usage.get("input_tokens"))
