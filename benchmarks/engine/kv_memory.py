"""How fast steps of the native decoder are with keys and values in int8, against the model's type.

    python -m benchmarks.engine.kv_memory --model DIR [--dtype bf16] [--quantization int8] [--sequences 1 8 64]

Both KV memories are in one process and take turns. They hold random numbers, as the time does not depend on them, so
nothing has to be prefilled; no two sequences share a block. Medians; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from app.config import ModelConfig
from app.engine.batch import Batch, ScheduledSequence
from app.engine.request import SamplingParams
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool
from app.model.cpu.weights import BITS
from app.model.inputs import build_inputs
from app.model.loader import load_model
from app.model.location import resolve_model_path
from app.model.ways.native_decoder import NativeModel
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.options import DTYPES

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


@torch.inference_mode()
def measure(given: argparse.Namespace) -> dict[str, Any]:
    config = ModelConfig(path=given.model, device="cpu", dtype=DTYPES[given.dtype], quantization=given.quantization)
    model = load_model(config, resolve_model_path(config.path), block_size=BLOCK_SIZE)
    assert isinstance(model, NativeModel), "the log says why"
    torch.set_num_threads(1)  # as in a replica with the native decoder
    num_blocks, threads = max(given.sequences) * -(-given.length // BLOCK_SIZE), ThreadPool(given.threads)
    decoders, figures = {}, dict[str, Any]()
    for name in (given.dtype, "int8"):
        pages = NativeKVCache(
            model.layers, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, in_int8=name == "int8"
        )
        figures[f"{name}_mib"] = round(_fill(pages) / 2**20)
        decoders[name] = NativeDecoder(model.weights, pages, threads)
    tell(f"KV memory: {figures}")
    for number in given.sequences:
        batch = _batch(number, length=given.length, num_tokens=given.tokens)
        steps = [{name: _times_ms(decoder, batch) for name, decoder in decoders.items()} for _ in range(given.steps)]
        row: dict[str, float] = {}
        for part, what in enumerate(("step", "attention")):
            row |= {f"{what}_{name}_ms": statistics.median(each[name][part] for each in steps[1:]) for name in decoders}
            row[f"{what}_ratio"] = row[f"{what}_{given.dtype}_ms"] / row[f"{what}_int8_ms"]
        figures[f"{number}"] = {key: round(value, 3) for key, value in row.items()}
        tell(f"{number} sequences: {figures[f'{number}']}")
    return figures


def _fill(pages: NativeKVCache) -> int:
    """Returns the bytes."""
    for tensor in pages.tensors:
        if tensor.dtype is torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.view(torch.float32 if tensor.is_floating_point() else pages.dtype).fill_(0.01)
    return sum(tensor.nbytes for tensor in pages.tensors)


def _batch(number: int, *, length: int, num_tokens: int) -> Batch:
    """The last tokens of some sequences of `length`."""
    blocks = torch.randperm(number * -(-length // BLOCK_SIZE)).view(number, -1).tolist()
    return Batch(
        tuple(
            ScheduledSequence(
                request_id=f"{at}", token_ids=(at,) * num_tokens, start=length - num_tokens, block_ids=own,
                samples=True, sampling=SamplingParams(max_tokens=1),
            )
            for at, own in enumerate(blocks)
        ),
        (),
    )  # fmt: skip


def _times_ms(decoder: NativeDecoder, batch: Batch) -> tuple[float, float]:
    """Of a step, and of its attention."""
    inputs, before = build_inputs(batch, block_size=BLOCK_SIZE, device=CPU), decoder.seconds()
    began_at = time.perf_counter()
    decoder.predict(batch, inputs)
    step_s = time.perf_counter() - began_at
    return 1e3 * step_s, 1e3 * (decoder.seconds()["attention"] - before["attention"])


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.kv_memory", __doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="a folder, or whatever model.path takes")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="the model's number type (bf16)")
    parser.add_argument("--quantization", choices=list(BITS), default="none", help="of the weights (none)")
    parser.add_argument(
        "--sequences", type=positive, nargs="+", default=[1, 8, 64], metavar="N", help="at once (1 8 64)"
    )
    parser.add_argument("--length", type=positive, default=1000, metavar="N", help="tokens of each (1,000)")
    parser.add_argument("--tokens", type=positive, default=1, metavar="N", help="of each that a step computes (1)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="that are measured (20)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of the decoder (2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
