r"""Measure how fast another engine serves a workload. All engines but transformers have their own environment:

    python -m benchmarks.peers.engines hf-static-32 --model DIR --workload FILE.jsonl
    $VLLM_ENV/bin/python -m benchmarks.peers.engines vllm-cpu --model DIR --workload FILE.jsonl
    $OPENVINO_ENV/bin/python -m benchmarks.peers.engines openvino --model EXPORTED_DIR --workload FILE.jsonl
    $MISTRAL_RS_ENV/bin/python -m benchmarks.peers.engines mistral-rs --model DIR --workload FILE.jsonl
    python -m benchmarks.peers.engines llama-cpp --model FILE.gguf --workload FILE.jsonl --program llama-batched-bench
    python -m benchmarks.peers.engines llama-cpp --model FILE.gguf --workload FILE.jsonl \
        --program '$LLAMA_ENV/bin/python -m benchmarks.peers.llama_batched'

Options and JSON are those of benchmarks.engine.throughput, and benchmarks.peers.compare reads them. Figures that a peer
does not report are null. Needs only pydantic, msgspec and torch in addition to the engine itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.engine.run import Contender, Setup, measured
from benchmarks.harness.command import command_parser, positive, run_command
from benchmarks.harness.options import add_run_options
from benchmarks.harness.workload import Workload, read_workload, read_workloads
from benchmarks.make_workload import VOCAB_SIZE
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.mistral_rs import MistralRs
from benchmarks.peers.openvino_genai import OpenVinoGenai
from benchmarks.peers.vllm_cpu import VllmCpu


class Peer(Contender, Protocol):
    """An engine that reports its version and settings."""

    version: str
    settings: list[str]


HF = ("hf-generate", "hf-static-8", "hf-static-32", "hf-continuous")  # the peers in `peers.hf`
ENGINES: dict[str, Callable[[argparse.Namespace], Peer]] = {
    "vllm-cpu": VllmCpu,
    "openvino": OpenVinoGenai,
    "llama-cpp": LlamaCpp,
    "mistral-rs": MistralRs,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("peers.engines", __doc__)
    names = (*HF, *ENGINES)
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    add_run_options(parser, repeat=3, outputs=True, also=True)
    parser.add_argument("--max-running", type=positive, default=64, metavar="N", help="most sequences at once")
    parser.add_argument("--vocab", type=positive, default=VOCAB_SIZE, metavar="N", help="the model's vocabulary size")
    parser.add_argument("--max-model-len", type=positive, default=1024, metavar="N", help="vllm-cpu: most tokens")
    parser.add_argument("--kv", default="same", help="openvino: type of KV memory: default, same (as --dtype), u8, ...")
    parser.add_argument("--activation-group", type=int, metavar="N", help="openvino: inputs per scale; 0: no scales")
    parser.add_argument("--program", metavar="COMMAND", default="llama-batched-bench", help="llama-cpp: the program")
    return run_command(parser, measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Load the engine, then measure all workloads."""
    workload, also = read_workload(given.workload), read_workloads(given.also)
    peer, setup = _loaded(given, Workload(tuple(each for one in (workload, *also.values()) for each in one.requests)))
    figures = measured(peer, setup, workload, also=also, repeat=given.repeat, outputs=given.outputs)
    if given.name == "llama-cpp":  # the kernel counts each ended child with our memory at the child's start
        for one in (figures, *figures["also"].values()):
            one["peak_rss_mb"] = None
    return figures


def _loaded(given: argparse.Namespace, workload: Workload) -> tuple[Contender, Setup]:
    if given.name in HF:
        from benchmarks.peers.hf import load_peer  # other engines' environments lack transformers

        return load_peer(given, workload)
    given.dtype = given.dtype or "bf16"
    peer = ENGINES[given.name](given)
    return peer, Setup(
        engine=f"{given.name} {peer.version}", model=given.model, workload=given.workload, dtype=given.dtype,
        threads=given.threads, device="cpu", settings=peer.settings,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
