"""Structured outputs on a live cluster of simulated replicas: over the wire, and over the death of a replica."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.chaos.stage import application
from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic, with_reference
from benchmarks.harness.http_call import Target
from tests.deployments.conftest import Deployed
from tests.deployments.strikes import assert_nothing_is_wrong, replica_pids, struck

APPLICATION = "structured"
PATTERN = "[a-z]{30,40}!"
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"kind": {"enum": ["owl", "wren"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "number"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}


# Behind each of three digits, which simulated replicas like to say, comes such an object; all else is free.
TAGS = {
    "structures": [{"begin": trigger, "schema": SCHEMA["items"], "end": "!"} for trigger in "135"],
    "triggers": list("135"),
}


def asked(name: str, **wanted: Any) -> Asked:
    body = {"model": MODEL_NAME, "prompt": [300, 301], "max_tokens": 1000, "stream": True, "seed": len(name)}
    return Asked(name, "seeded", body | {"stream_options": {"include_usage": True}} | wanted)


REQUESTS = [
    *(asked("r" * n, structured_outputs={"regex": PATTERN}) for n in range(1, 5)),
    *(asked("s" * n, structured_outputs={"json": SCHEMA}) for n in range(1, 5)),
    *(asked("t" * n, structured_outputs={"structural_tag": TAGS}, max_tokens=90, ignore_eos=True) for n in range(1, 3)),
]


@pytest.fixture(scope="module")
def traffic(deployed: Deployed, demo_path: Path) -> Iterator[Traffic]:
    args = application(num_replicas=2, step_ms=20, model=str(demo_path), silence_timeout_s=1.0)
    with deployed(APPLICATION, args) as url:
        yield asyncio.run(with_reference(Target.parse(url), REQUESTS))


def test_what_was_asked_for_comes(traffic: Traffic) -> None:
    for name, stream in traffic.reference.items():
        if name.startswith("t"):
            assert re.match(r"[^135]*[135]\{\s*(\"|$)", stream.texts[0]), stream.texts
            continue
        assert stream.finish_reasons == {0: "stop"}
        if name.startswith("r"):
            assert re.fullmatch(PATTERN, stream.texts[0]), stream.texts
        else:
            jsonschema.validate(json.loads(stream.texts[0]), SCHEMA)


def test_what_cannot_be_compiled_is_refused_before_any_answer_begins(traffic: Traffic) -> None:
    stream = asyncio.run(traffic.ask(asked("refused", structured_outputs={"regex": "(("})))
    assert stream.status == 400
    assert stream.error is not None
    assert (stream.error["code"], stream.error["param"]) == ("invalid_grammar", "structured_outputs.regex")


def test_killing_a_replica_changes_no_token(traffic: Traffic) -> None:
    fresh = replace(traffic, answers=[])
    struck(fresh, lambda: os.kill(replica_pids(APPLICATION, f"replica-{MODEL_NAME}")[0], signal.SIGKILL))
    assert_nothing_is_wrong(fresh)
