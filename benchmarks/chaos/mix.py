"""The requests of the failure tests: everything that has state which a lost replica takes with it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_NAME = "chaos"
KINDS = ("greedy", "seeded", "penalties", "stop", "min_tokens", "n=3")
_PROMPT_TOKENS = (5, 60)
_FIRST_TOKEN = 300  # prompts are of ids from here on: text in most vocabularies
_STOP_CHARACTERS = 7  # more than most tokens have, so that it spans two or three


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, by a name that begins with its kind."""

    name: str
    kind: str
    body: Mapping[str, Any]


def mixed(number: int, *, max_tokens: tuple[int, int], seed: int = 7) -> list[Asked]:
    """So many requests of all kinds in turn; lengths differ. The kind `stop` has none yet: see `with_stop`."""
    source = random.Random(seed)
    return [_asked(place, KINDS[place % len(KINDS)], source, max_tokens) for place in range(number)]


def alike(number: int, *, num_tokens: int, num_prompt_tokens: int = 20) -> list[Asked]:
    """So many requests of one length, so that all are at the same point of it."""
    source = random.Random(11)
    lengths = {"max_tokens": num_tokens, "ignore_eos": True}
    return [
        Asked(
            f"alike {place}", "seeded", _body(source, num_prompt_tokens) | {"seed": place, "temperature": 1} | lengths
        )
        for place in range(number)
    ]


def with_stop(asked: Asked, text: str) -> Asked:
    """The request with a stop string that its answer, which is `text` without one, meets on the way."""
    place = max(1, 2 * len(text) // 3)
    return Asked(asked.name, asked.kind, {**asked.body, "stop": [text[place : place + _STOP_CHARACTERS]]})


def _asked(place: int, kind: str, source: random.Random, max_tokens: tuple[int, int]) -> Asked:
    body = _body(source, source.randint(*_PROMPT_TOKENS)) | {"max_tokens": source.randint(*max_tokens)}
    if kind != "greedy":
        body |= {"temperature": 0.9, "seed": source.randrange(2**31)}
    if kind == "penalties":
        body |= {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
    if kind == "min_tokens":
        body |= {"min_tokens": body["max_tokens"] // 2}
    if kind == "n=3":
        body |= {"n": 3, "max_tokens": -(-body["max_tokens"] // 2)}
    return Asked(f"{kind} {place}", kind, body)


def _body(source: random.Random, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": source.choices(range(_FIRST_TOKEN, 2 * _FIRST_TOKEN), k=num_prompt_tokens),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
