"""A folder beside a GPU's KV memory: the first token of a prompt that is fetched, against one that is computed.

The folder's files stay in the host's page cache. The prompt is computed, another takes all KV memory, then the first
comes again; each round anew.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Sequence
from contextlib import closing

from app.config import GIB, TierConfig
from app.engine.engine import Engine
from app.engine.request import Request, SamplingParams
from app.kv_tiers.tier_store import TierStore, open_folder
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.models import engine_config, engine_of, made_model
from benchmarks.harness.command import BenchmarkError

_SETTLE_S = 60.0
_NAMESPACE = bytes(16)  # the weights are made up


def measure(bench: Bench) -> None:
    """Puts seconds, their ratio, and bytes a second."""
    num_tokens = bench.sized(8192, 3 * BLOCK_SIZE)
    num_blocks = num_tokens // BLOCK_SIZE + 2
    config = engine_config(bench, max_running=2, max_model_len=num_tokens + BLOCK_SIZE, num_blocks=num_blocks)
    model, folder = made_model(config), bench.out / "kv"
    rng = random.Random(0)
    computed, fetched, written = [], [], []
    for number in range(bench.sized(3, 1)):
        shutil.rmtree(folder, ignore_errors=True)
        engine = engine_of(config, model)
        memory = engine.runner.kv_memory()
        if memory is None:
            raise BenchmarkError("this model runner's KV memory cannot be copied")
        tier = TierConfig(path=str(folder), max_gib=4 * num_blocks * memory.block_bytes / GIB)
        store = TierStore(
            open_folder(tier, namespace=_NAMESPACE, block_bytes=memory.block_bytes), engine.runner.kv_memory,
            namespace=_NAMESPACE,
        )  # fmt: skip
        store.min_tokens = 0
        engine = engine_of(config, model, runner=engine.runner, store=store)
        with closing(store):
            _first_token_s(engine, _prompt(rng, num_tokens))  # captures, and what is compiled for this length
            prompt = _prompt(rng, num_tokens)
            seconds, expected = _first_token_s(engine, prompt)
            began_at = time.perf_counter()
            store.settle(_SETTLE_S)
            written.append(time.perf_counter() - began_at)
            _first_token_s(engine, _prompt(rng, num_tokens))
            store.settle(_SETTLE_S)
            again_s, token_ids = _first_token_s(engine, prompt)
            num_read = store.stats().num_read
        if token_ids != expected:
            raise BenchmarkError(f"round {number}: with a tier other tokens were generated")
        if not num_read:
            raise BenchmarkError("nothing was fetched: computing was expected to be quicker")
        computed.append(seconds)
        fetched.append(again_s)
        bench.row(
            "tier", round=number, tokens=num_tokens, computed_s=round(seconds, 4), fetched_s=round(again_s, 4),
            ratio=round(again_s / seconds, 3), blocks=num_read, block_mib=round(memory.block_bytes / 2**20, 3),
            read_gb_per_s=round(num_read * memory.block_bytes / again_s / 1e9, 2), write_s=round(written[-1], 3),
        )  # fmt: skip
    ratios = [again_s / first_s for again_s, first_s in zip(fetched, computed, strict=True)]
    bench.put(fetched_over_computed=round(statistics.median(ratios), 3))


def _prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 300) for _ in range(num_tokens))


def _first_token_s(engine: Engine, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Of a request alone, and its tokens."""
    began_at, first_s, token_ids = time.perf_counter(), 0.0, list[int]()
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id="alone", prompt_token_ids=tuple(prompt), sampling=sampling))
    while engine.has_work:
        if engine.idle_s:
            time.sleep(min(engine.idle_s, 0.0005))
        for delta in engine.step():
            first_s = first_s or time.perf_counter() - began_at
            token_ids += delta.token_ids
    return first_s, token_ids
