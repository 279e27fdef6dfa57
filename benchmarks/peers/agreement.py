"""How far two runs agree on tokens: `python -m benchmarks.peers.agreement REFERENCE.jsonl OTHER.jsonl …`.

Files as `--outputs` writes them: one request a line, `{"id", "token_ids"}`. Prints a table and, as the last line, one
JSON object. Rounding sends greedy decoding down another path sooner or later, so what counts is how a peer compares.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from benchmarks.harness.command import BenchmarkError, command_parser, refused
from benchmarks.harness.figures import table


@dataclass(frozen=True, slots=True)
class Agreement:
    """One file against the reference."""

    file: str
    num_requests: int
    num_equal: int  # all tokens
    share_before_first_difference: float  # of a request's tokens, the mean

    @classmethod
    def of(cls, file: str, reference: dict[str, list[int]], other: dict[str, list[int]]) -> Agreement:
        if reference.keys() != other.keys():
            raise BenchmarkError(f"{file} is about other requests than the reference")
        prefixes = [_equal_prefix(tokens, other[name]) for name, tokens in reference.items()]
        lengths = [max(len(tokens), len(other[name]), 1) for name, tokens in reference.items()]
        return cls(
            file=file,
            num_requests=len(reference),
            num_equal=sum(reference[name] == other[name] for name in reference),
            share_before_first_difference=statistics.fmean(
                prefix / length for prefix, length in zip(prefixes, lengths, strict=True)
            ),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("peers.agreement", __doc__)
    parser.add_argument("reference", metavar="REFERENCE.jsonl")
    parser.add_argument("others", nargs="+", metavar="OTHER.jsonl")
    given = parser.parse_args(arguments)
    try:
        reference = read_outputs(given.reference)
        found = [Agreement.of(file, reference, read_outputs(file)) for file in given.others]
    except BenchmarkError as error:
        return refused(error)
    rows = [
        [one.file, f"{one.num_equal} of {one.num_requests}", f"{one.share_before_first_difference:.1%}"]
        for one in found
    ]
    print(table(["outputs", "equal requests", "tokens before the first difference"], rows))
    print(json.dumps([asdict(one) for one in found]))
    return 0


def read_outputs(path: str) -> dict[str, list[int]]:
    """Request id → token ids. Raises BenchmarkError with the line that cannot be read."""
    outputs: dict[str, list[int]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    entry = json.loads(line)
                    outputs[str(entry["id"])] = [int(token) for token in entry["token_ids"]]
                except (ValueError, KeyError, TypeError) as error:
                    raise BenchmarkError(
                        f"{path}:{number} is no line of outputs, an object with id and token_ids: {error!r}"
                    ) from error
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error}") from error
    if not outputs:
        raise BenchmarkError(f"{path} holds no outputs")
    return outputs


def _equal_prefix(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


if __name__ == "__main__":
    sys.exit(main())
