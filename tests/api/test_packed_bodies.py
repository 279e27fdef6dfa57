"""Bodies that their client has packed: read within the limits of others, or refused with what to do."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from app.api.prepared_request import RequestLimits
from app.text import Tokenizer
from tests.kit.service import Connection, Service, http_client, say
from tests.stalls import slowness, stalls_of_loop

BODY = json.dumps({"prompt": "Hi"}).encode()
MOST = RequestLimits().max_body_bytes


def bare(data: bytes, level: int = 9) -> bytes:
    """Deflate without the header of zlib."""
    packing = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return packing.compress(data) + packing.flush()


def padded(num_bytes: int) -> bytes:
    """A body of so many bytes."""
    return BODY + b" " * (num_bytes - len(BODY))


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP ", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", bare(BODY)),
        ("identity", BODY),
        ("gzip", gzip.compress(padded(MOST))),
        ("deflate", bare(padded(100_000), level=0)),  # large packed too
    ],
    ids=["gzip", "another-case", "deflate", "without-header", "identity", "as-large-as-may-be", "large-packed"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_packed_body_is_read(service: Service, path: str, encoding: str, packed: bytes) -> None:
    answer = service.call("POST", path, packed, {"content-encoding": encoding})
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x" * 1000])
def test_one_packed_in_another_way_is_a_415_that_says_what_to_do(service: Service, encoding: str) -> None:
    answer = service.call("POST", "/v1/completions", BODY, {"content-encoding": encoding})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    message = answer.error["message"]
    words = f"the body has the Content-Encoding {encoding[:40]!r}; send it without one or with gzip or deflate"
    assert message == words


@pytest.mark.parametrize(
    ("encoding", "packed", "words"),
    [
        ("gzip", BODY, "incorrect header check"),
        ("deflate", BODY, "is not valid deflate"),
        ("gzip", gzip.compress(BODY)[:-5], "it ends too early"),
        ("gzip", b"", "it ends too early"),
        ("deflate", b"", "it ends too early"),
        ("gzip", gzip.compress(BODY)[:-8] + bytes(8), "incorrect data check"),
        ("gzip", gzip.compress(BODY) + gzip.compress(BODY), "it has data after its end"),
        ("gzip", gzip.compress(b"{"), "the body is not valid JSON"),
    ],
    ids=["plain", "no-deflate", "cut-off", "empty-gzip", "empty-deflate", "wrong-sum", "two-at-once", "no-json"],
)
def test_what_cannot_be_unpacked_is_a_400(service: Service, encoding: str, packed: bytes, words: str) -> None:
    answer = service.call("POST", "/v1/completions", packed, {"content-encoding": encoding})
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert words in answer.error["message"]


def test_the_size_counts_unpacked(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), max_body_bytes=1024)
    packed = {num_bytes: gzip.compress(padded(num_bytes)) for num_bytes in (1024, 1025, 900_000)}
    assert len(packed[900_000]) < 1024
    calls = {
        size: service.call("POST", "/v1/completions", packed[size], {"content-encoding": "gzip"}) for size in packed
    }
    assert [answer.status for answer in calls.values()] == [200, 413, 413]
    message = calls[900_000].error["message"]
    assert message == "the body has more than 1,024 bytes after decompression; this server accepts at most 1,024"


@pytest.mark.usefixtures("collected_as_served")
@pytest.mark.parametrize("of", ["one byte", "empty blocks", "values"])
async def test_no_packed_body_within_the_limits_stops_the_loop(tokenizer: Tokenizer, of: str) -> None:
    packed = {
        "one byte": bare(b" " * (1032 * 4_000)),
        "empty blocks": b"\x00\x00\x00\xff\xff" * (MOST // 5),
        "values": gzip.compress(b'{"prompt": "Hi", "x": [' + b"[]," * 1_300_000 + b"[]]}"),
    }[of]
    service = Service(tokenizer, say(tokenizer, "3"))
    headers = {"content-encoding": "gzip" if of == "values" else "deflate"}
    chunks = [packed[start : start + 65_536] for start in range(0, len(packed), 65_536)]
    async with stalls_of_loop() as stalls, Connection(service.app, "POST", "/v1/completions", chunks, headers) as sent:
        await sent.finished()
    assert sent.answer().status in (400, 413)
    assert stalls.longest_s < 0.05 * slowness()


async def test_an_upload_is_not_unpacked(service: Service, tmp_path: Path) -> None:
    upload: dict[str, Any] = {
        "files": {"file": ("a.jsonl", b"{}")},
        "data": {"purpose": "batch"},
        "headers": {"content-encoding": "gzip"},
    }
    async with http_client(service, tmp_path) as client:
        answer = await client.post("/v1/files", **upload)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == "the body has the Content-Encoding 'gzip'; send it without one"
