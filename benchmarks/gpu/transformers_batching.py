"""Run transformers' own continuous batching on the requests of the stage `engine`, with a model of the same shape."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from benchmarks.engine.run import warmed_up
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine import cells_of, requests_for
from benchmarks.gpu.models import engine_config, random_module
from benchmarks.peers.hf import TransformersContinuous


def measure(bench: Bench) -> None:
    found = AutoConfig.from_pretrained(engine_config(bench).model.path)
    module = random_module(found, torch.bfloat16, bench.device, attention="sdpa")
    contender, workload = TransformersContinuous(module), requests_for(bench)
    warmed_up(contender, workload)
    cells = cells_of(workload, contender.serve(workload))
    bench.row("transformers", **cells)
    ours = bench.of_earlier("engine", "output_tokens_per_s")
    rate = cells["output_tokens_per_s"]
    bench.put(output_tokens_per_s=rate, ours_over_theirs=round(ours / rate, 2) if ours and rate else None)
