"""Injects faults and records their effects on clients: the reliability table, one JSON line per row.

    python -m benchmarks.chaos R1 R4 --runs 50 --streams 64 --json reliability.jsonl

Each row starts the service as `make serve` does, with simulated replicas that follow a cost model, sends HTTP requests
and injects its fault. Answers are compared with the answers to the same requests without a fault. Progress goes to
stderr. Without ROW, all rows run one after the other. R14 kills and stops processes of every kind at random for
`--minutes`: `strikes` lists the process and the time of each fault, `outcomes` counts the results of the streams
(`cut` is expected after a fault of an ingress or HAProxy), and `missing` lists parts that did not recover. R8 and
`node` need root on Linux for hosts in a private network; elsewhere these rows are skipped, and the line says why.

Exits with 1 if a stream was wrong or hung, if the service still held resources at the end, or if it did not recover.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from benchmarks.chaos.at_random import strike_at_random
from benchmarks.chaos.client_faults import disconnect_at_each_phase, kill_clients
from benchmarks.chaos.faults import (
    crash_on_request,
    kill_at_each_phase,
    kill_controller,
    kill_ingress,
    kill_one_of_three,
    kill_proxy,
    kill_several,
    kill_with_adapters,
    kill_with_pipelines,
    kill_with_weights,
    lose_rank,
    part_from_replicas,
    stop_one_of_three,
)
from benchmarks.chaos.lost_cards import lose_cards
from benchmarks.chaos.node_loss import lose_nodes
from benchmarks.chaos.rolling_update import change_under_load
from benchmarks.chaos.stage import MODEL, Size
from benchmarks.chaos.tier_faults import break_tier
from benchmarks.chaos.verdict import is_bad, without_samples
from benchmarks.harness.command import (
    BenchmarkError,
    command_parser,
    did_you_mean,
    positive,
    refused,
    tell,
    where,
    write_json,
)

Row = Callable[[Size], Coroutine[Any, Any, list[dict[str, Any]]]]

ROWS: dict[str, Row] = {
    "R1": kill_one_of_three,
    "R2": kill_with_weights,
    "R3": kill_at_each_phase,
    "R4": stop_one_of_three,
    "R5": kill_several,
    "R6": kill_ingress,
    "R7": kill_controller,
    "R8": part_from_replicas,
    "R9": crash_on_request,
    "R10": lose_rank,
    "R11": kill_with_adapters,
    "R12": kill_with_pipelines,
    "R13": change_under_load,
    "R14": strike_at_random,
    "R15": break_tier,
    "R16": lose_cards,
    "R17": kill_proxy,
    "node": lose_nodes,
    "C1": disconnect_at_each_phase,
    "C7": kill_clients,
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    setup = where()
    size = Size(given.runs, given.streams, given.seed, given.minutes, given.model, given.state_slots)
    lines, is_any_bad = [], False
    try:
        for name in given.rows:
            if name not in ROWS:
                raise BenchmarkError(f"there is no row {name!r}{did_you_mean(name, ROWS)}")
        for name in given.rows or ROWS:
            tell(f"{name}: starting a service")
            for found in asyncio.run(ROWS[name](size)):
                line = found | {"seed": given.seed} | setup
                is_any_bad |= is_bad(line)
                lines.append(json.dumps(line))
                print(json.dumps(without_samples(line)), flush=True)
        if given.json is not None:
            write_json(given.json, "\n".join(lines))
    except BenchmarkError as error:
        return refused(error)
    return int(is_any_bad)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("chaos", __doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to run, from {', '.join(ROWS)}")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="number of faults in a row with repeats")
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="number of concurrent clients")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="duration of R14")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the times and victims of the faults")
    parser.add_argument("--model", default=MODEL, metavar="DIR", help="folder with a tokenizer and weights")
    parser.add_argument(
        "--state-slots", type=int, default=0, metavar="N", help="state slots of simulated replicas (recurrent layers)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the lines to this file, with all samples")
    return parser


if __name__ == "__main__":
    sys.exit(main())
