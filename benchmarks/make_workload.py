"""Make the workloads of the figures in docs, from a seed: `python -m benchmarks.make_workload sharegpt --out FILE`.

    sharegpt        64 requests of ragged lengths: log-normal, 16 to 512 prompt tokens, 8 to 256 to generate
    uniform         32 requests of 128 prompt tokens, 64 to generate
    shared_prefix   64 requests that share 384 prompt tokens, 32 of their own each, 64 to generate
    decode          32 requests of 16 prompt tokens, 128 to generate; for the rate of decode at any number at once
    prefill         8 requests of 512 prompt tokens, one to generate

The tokens are random, sampling is greedy, and end-of-text is ignored. Lengths depend only on the name and the seed;
tokens also depend on the vocabulary. --requests changes the number of requests, and --prompt changes the length of
their prompts. With --tenants, the first tenant sends half of the requests and the other tenants send the rest.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, positive, refused, tell

SEED = 1234
VOCAB_SIZE = 49152
_FIRST_TOKEN = 300  # smaller ids are special tokens and single bytes in many vocabularies
_VARIANT = 0  # of the tokens: another number gives other tokens in prompts of equal lengths

Line = dict[str, Any]


def make_workload(
    name: str,
    *,
    vocab_size: int = VOCAB_SIZE,
    seed: int = SEED,
    num_requests: int | None = None,
    num_prompt: int | None = None,
    num_tenants: int = 1,
) -> list[Line]:
    """Return the lines of a workload.

    Raises:
        BenchmarkError: the vocabulary is too small, or the prompts of this workload differ in length.
    """
    if num_prompt and name in _OF_OTHER_LENGTHS:
        raise BenchmarkError(f"--prompt {num_prompt:,}: the prompts of {name} have lengths of their own; leave it out")
    if vocab_size <= _FIRST_TOKEN:
        raise BenchmarkError(f"--vocab {vocab_size:,}: prompts are of ids from {_FIRST_TOKEN} up; it must be larger")
    lengths = random.Random(f"{name}-{seed}")
    tokens = Tokens(random.Random(f"{name}-{seed}-{_VARIANT}"), vocab_size)
    usual_number, make = WORKLOADS[name]
    if num_prompt:
        make = partial(make, num_prompt=num_prompt)
    requests = make(lengths, tokens, num_requests or usual_number)
    return [
        {"id": f"{name}-{number}", "prompt_token_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        | ({"tenant": f"tenant-{_tenant(number, num_tenants)}"} if num_tenants > 1 else {})
        for number, (prompt, max_tokens) in enumerate(requests)
    ]


class Tokens:
    """Uniformly random token ids."""

    def __init__(self, source: random.Random, vocab_size: int) -> None:
        self._source = source
        self._known = range(_FIRST_TOKEN, vocab_size)

    def draw(self, number: int) -> list[int]:
        return self._source.choices(self._known, k=number)


Lengths = tuple[list[int], int]  # the tokens of a prompt, and the number of tokens to generate


def _ragged(lengths: random.Random, tokens: Tokens, num_requests: int) -> list[Lengths]:
    requests = []
    for _ in range(num_requests):
        num_prompt = _between(16, lengths.lognormvariate(4.75, 0.9), 512)
        num_output = _between(8, lengths.lognormvariate(4.25, 0.85), 256)
        requests.append((tokens.draw(num_prompt), num_output))
    return requests


def _equal(
    _: random.Random, tokens: Tokens, num_requests: int, *, num_prompt: int, num_output: int, num_shared: int = 0
) -> list[Lengths]:
    """Make requests of one length with a common prefix of `num_shared` tokens."""
    prefix = tokens.draw(num_shared)
    return [(prefix + tokens.draw(num_prompt), num_output) for _ in range(num_requests)]


WORKLOADS: dict[str, tuple[int, Callable[..., list[Lengths]]]] = {
    "sharegpt": (64, _ragged),
    "uniform": (32, partial(_equal, num_prompt=128, num_output=64)),
    "shared_prefix": (64, partial(_equal, num_prompt=32, num_output=64, num_shared=384)),
    "decode": (32, partial(_equal, num_prompt=16, num_output=128)),
    "prefill": (8, partial(_equal, num_prompt=512, num_output=1)),
}
_OF_OTHER_LENGTHS = ("sharegpt", "shared_prefix")


def _tenant(number: int, num_tenants: int) -> int:
    """Return the tenant of a request. Every second request belongs to the first tenant."""
    return 0 if number % 2 == 0 else 1 + number // 2 % (num_tenants - 1)


def _between(low: int, value: float, high: int) -> int:
    return max(low, min(high, int(value)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("make_workload", __doc__)
    parser.add_argument("name", choices=tuple(WORKLOADS))
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, metavar="N", help="the model's vocabulary size")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--requests", type=positive, metavar="N", help="number of requests; default: as above")
    parser.add_argument("--prompt", type=positive, metavar="N", help="tokens of each prompt; default: as above")
    parser.add_argument("--tenants", type=positive, default=1, metavar="N", help="number of tenants of the requests")
    given = parser.parse_args(arguments)
    try:
        lines = make_workload(
            given.name,
            vocab_size=given.vocab,
            seed=given.seed,
            num_requests=given.requests,
            num_prompt=given.prompt,
            num_tenants=given.tenants,
        )
    except BenchmarkError as error:
        return refused(error)
    out = Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    num_prompt = sum(len(line["prompt_token_ids"]) for line in lines)
    num_output = sum(line["max_tokens"] for line in lines)
    tell(f"{out}: {len(lines)} requests, {num_prompt:,} prompt tokens, {num_output:,} to generate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
