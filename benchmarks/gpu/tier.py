"""Compare the first token of a prompt fetched from a folder beside a GPU's KV memory with a computed prompt.

The folder's files stay in the host's page cache. In each round, the prompt is computed, another prompt takes all KV
memory, then the first prompt comes again.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from contextlib import closing
from functools import partial

from app.config import GIB, TierConfig
from app.kv_tiers.tier_store import TierStore, open_folder
from benchmarks.engine.tiers import SETTLE_S, first_token_s, random_tokens
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.models import engine_config, engine_of, made_model
from benchmarks.harness.command import BenchmarkError

_NAMESPACE = bytes(16)  # the weights are random


def measure(bench: Bench) -> None:
    """Measure the seconds, their ratio, and the bytes a second."""
    num_tokens = bench.sized(8192, 3 * BLOCK_SIZE)
    num_blocks = num_tokens // BLOCK_SIZE + 2
    config = engine_config(bench, max_running=2, max_model_len=num_tokens + BLOCK_SIZE, num_blocks=num_blocks)
    model, folder = made_model(config), bench.out / "kv"
    prompt = partial(random_tokens, random.Random(0), num_tokens, below=bench.sized(150_000, 320))
    ratios: list[float] = []
    for number in range(bench.sized(3, 1)):
        shutil.rmtree(folder, ignore_errors=True)
        runner = model.runner(config, num_blocks=num_blocks, num_threads=1)
        memory = runner.kv_memory()
        if memory is None:
            raise BenchmarkError("this model runner's KV memory cannot be copied")
        tier = TierConfig(path=str(folder), max_gib=4 * num_blocks * memory.block_bytes / GIB)
        opened = open_folder(tier, namespace=_NAMESPACE, block_bytes=memory.block_bytes)
        store = TierStore(opened, runner.kv_memory, namespace=_NAMESPACE)
        store.min_tokens = 0
        engine = engine_of(config, model, runner=runner, store=store)
        with closing(store):
            first_token_s(engine, prompt())  # captures graphs and compiles for this length
            asked = prompt()
            computed_s, expected = first_token_s(engine, asked)
            began_at = time.perf_counter()
            store.settle(SETTLE_S)
            write_s = time.perf_counter() - began_at
            first_token_s(engine, prompt())
            store.settle(SETTLE_S)
            fetched_s, token_ids = first_token_s(engine, asked)
            num_read = store.stats().num_read
        if token_ids != expected:
            raise BenchmarkError(f"round {number}: an engine with a tier generated different tokens")
        if not num_read:
            raise BenchmarkError("nothing was fetched: the engine expected to compute faster")
        ratios.append(fetched_s / computed_s)
        bench.row(
            "tier", round=number, tokens=num_tokens, computed_s=round(computed_s, 4), fetched_s=round(fetched_s, 4),
            ratio=round(ratios[-1], 3), blocks=num_read, block_mib=round(memory.block_bytes / 2**20, 3),
            read_gb_per_s=round(num_read * memory.block_bytes / fetched_s / 1e9, 2), write_s=round(write_s, 3),
        )  # fmt: skip
    bench.put(fetched_over_computed=round(statistics.median(ratios), 3))
