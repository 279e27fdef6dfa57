"""The options of all benchmarks that run a workload."""

from __future__ import annotations

import argparse

from app.cores import num_cores
from benchmarks.harness.command import positive

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    repeat: int | None = None,
    outputs: bool = False,
    settings: bool = False,
    also: bool = False,
) -> None:
    """Add the options for model, workload, dtype and machine. `repeat`: the default of `--repeat`, if it is added."""
    parser.set_defaults(repeat=1, outputs=None, set=[], also=[])  # for the options that are not added
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a transformers model, or a hub id")
    parser.add_argument("--workload", required=True, metavar="FILE.jsonl", help="one request per line")
    if also:
        parser.add_argument(
            "--also", nargs="+", action="extend", default=[], metavar="FILE.jsonl",
            help="workloads to run after --workload, in the same process",
        )  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--threads", type=positive, default=num_cores(), metavar="N", help="CPU threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    if repeat is not None:
        parser.add_argument("--repeat", type=positive, default=repeat, metavar="N", help="timed runs after the warm-up")
    if outputs:
        parser.add_argument("--outputs", metavar="FILE", help="write each request's token ids to FILE, as JSONL")
    if settings:
        parser.add_argument(
            "--set", nargs="+", action="extend", default=[], metavar="PATH=VALUE",
            help="an engine setting by its dotted path, for example scheduler.max_step_tokens=512",
        )  # fmt: skip
