"""transformers as a peer, without paging or other code of ours.

Has two kinds of peers: `generate` on padded batches that run until their longest request is done, and transformers' own
continuous batching through its manager, which batches as we do.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from app.config import ModelConfig
from app.model.implementations.transformers_code import eos_token_ids
from app.model.location import resolve_model_path
from benchmarks.engine.engine_setup import dtype_name, resolve_device
from benchmarks.engine.run import Contender, MonotonicClock, Run, Setup, Timeline
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.options import DTYPES
from benchmarks.harness.workload import TimedRequest, Workload

PAGE_SIZE = 32
MAX_STEP_TOKENS = 512
MAX_RUNNING = 64
NO_EOS = -1  # the manager takes this as "never"
_PATIENCE_S = 1.0  # how often to check, while waiting for a result, that the thread lives


def load_peer(given: argparse.Namespace, workload: Workload) -> tuple[Contender, Setup]:
    """Load the weights with torch's own attention (sdpa).

    Raises:
        BenchmarkError: there is no such model or device, or a request samples: peers are measured greedily.
    """
    sampled = next((timed for timed in workload.requests if not timed.request.sampling.is_greedy), None)
    if sampled is not None:
        raise BenchmarkError(f"request {sampled.request.request_id!r} has a temperature; the peers run greedily")
    torch.set_num_threads(given.threads)
    device = resolve_device(given.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: torch sees no CUDA device")
    # Uses the engine's own default if no type is given, so that the two stay comparable.
    dtype = given.dtype or dtype_name(ModelConfig(path=given.model, device=device))
    tell(f"loading {given.model} for {given.name}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(given.model), dtype=getattr(torch, DTYPES[dtype]), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{given.model} cannot be loaded: {error}") from error
    setup = Setup(
        engine=given.name, model=given.model, workload=given.workload, dtype=dtype, threads=given.threads,
        device=device, settings=[],
    )  # fmt: skip
    return PEERS[given.name](model.eval().to(device)), setup


class StaticBatches:
    """Batches of a fixed size in order of arrival. A batch starts when its last request has arrived."""

    def __init__(self, model: Any, *, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._eos_token_ids = list(eos_token_ids(model))
        model.generation_config.eos_token_id = None  # given with each batch instead

    def serve(self, workload: Workload) -> Run:
        requests = workload.requests
        timelines = {timed.request.request_id: Timeline(timed.arrival_s) for timed in requests}
        clock = MonotonicClock()
        for start in range(0, len(requests), self._batch_size):
            batch = requests[start : start + self._batch_size]
            clock.wait_until(batch[-1].arrival_s)
            rows = self._generate(batch)
            at_s = clock.now()
            for timed, row in zip(batch, rows, strict=True):
                timelines[timed.request.request_id].deliver(row, at_s=at_s)
        return Run(seconds=clock.now(), timelines=timelines, streams=False)

    def forget(self) -> None:
        """Do nothing: no state remains between batches."""

    @torch.inference_mode()
    def _generate(self, batch: Sequence[TimedRequest]) -> list[list[int]]:
        stops = self._stops(batch)
        token_ids, mask = padded([timed.request.prompt_token_ids for timed in batch])
        device = self._model.device
        output = self._model.generate(
            input_ids=token_ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            max_new_tokens=max(timed.max_tokens for timed in batch),
            eos_token_id=stops or None,
            pad_token_id=0,
        )
        generated: list[list[int]] = output[:, token_ids.shape[1] :].tolist()
        return [own_tokens(row, timed.max_tokens, stops) for row, timed in zip(generated, batch, strict=True)]

    def _stops(self, batch: Sequence[TimedRequest]) -> list[int]:
        ignoring = {timed.request.sampling.ignore_eos for timed in batch}
        if len(ignoring) > 1:
            raise BenchmarkError("a static batch ends at end-of-text for all or for none; set ignore_eos on every line")
        return [] if ignoring == {True} else self._eos_token_ids


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, both [num_prompts, longest], padded with 0 on the left."""
    width = max(len(prompt) for prompt in prompts)
    token_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return token_ids, mask


def own_tokens(row: list[int], max_tokens: int, stops: Sequence[int]) -> list[int]:
    """Return a request's own tokens of its row: the batch ran until its longest request was done."""
    row = row[:max_tokens]
    end = next((index for index, token in enumerate(row) if token in stops), None)
    return row if end is None else row[: end + 1]


class TransformersContinuous:
    """A fresh manager, and so an empty cache, for every run. The start of manager and cache is not timed.

    On a CPU the cache gets room for the whole workload. On a GPU the cache sizes itself, the manager captures its
    graphs and uses flash attention if that is installed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._eos_token_ids = list(eos_token_ids(model))

    def serve(self, workload: Workload) -> Run:
        on_gpu = self._model.device.type == "cuda"
        with self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig() if on_gpu else _cpu_config(workload),
            warmup=on_gpu,
        ) as manager:
            self._make_cache(manager)
            return self._serve(manager, workload)

    def forget(self) -> None:
        """Do nothing: every run has its own manager."""

    def _make_cache(self, manager: Any) -> None:
        """Send a first request, so that the manager's thread allocates its cache."""
        manager.add_request(input_ids=[0], request_id="cache", max_new_tokens=1, eos_token_id=NO_EOS)
        while _next_result(manager, _PATIENCE_S) is None:
            pass

    def _serve(self, manager: Any, workload: Workload) -> Run:
        timelines = {timed.request.request_id: Timeline(timed.arrival_s) for timed in workload.requests}
        arriving = deque(workload.requests)
        num_open = len(workload.requests)
        origin = time.perf_counter()  # the manager's timestamps use this clock
        clock = MonotonicClock()
        while num_open:
            while arriving and arriving[0].arrival_s <= clock.now():
                self._add(manager, arriving.popleft())
            until_next_s = max(0.0, arriving[0].arrival_s - clock.now()) if arriving else _PATIENCE_S
            result = _next_result(manager, min(until_next_s, _PATIENCE_S))
            if result is not None:
                num_open -= 1
                _book(timelines[result.request_id], result, origin)
        return Run(seconds=clock.now(), timelines=timelines)

    def _add(self, manager: Any, timed: TimedRequest) -> None:
        request = timed.request
        stops = [] if request.sampling.ignore_eos else self._eos_token_ids
        manager.add_request(
            input_ids=list(request.prompt_token_ids),
            request_id=request.request_id,
            max_new_tokens=timed.max_tokens,
            record_timestamps=True,
            eos_token_id=stops or NO_EOS,
        )


def _cpu_config(workload: Workload) -> ContinuousBatchingConfig:
    # transformers 5.17 has another name for this setting.
    page_size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    return ContinuousBatchingConfig(
        **{page_size: PAGE_SIZE},
        num_blocks=sum(timed.max_total_tokens // PAGE_SIZE + 2 for timed in workload.requests),
        max_batch_tokens=MAX_STEP_TOKENS,
        max_requests_per_batch=MAX_RUNNING,
        max_blocks_per_request=0,
    )


def _next_result(manager: Any, patience_s: float) -> Any:
    """Return the next finished request, or None if none came in time."""
    result = manager.get_result(timeout=patience_s)
    if result is None:
        if not manager.is_running():
            raise BenchmarkError("the thread of transformers' continuous batching has ended")
        return None
    if result.error is not None:
        raise BenchmarkError(f"transformers' continuous batching failed on {result.request_id}: {result.error}")
    return result if result.is_finished() else None


def _book(timeline: Timeline, result: Any, origin: float) -> None:
    for token_id, at in zip(result.generated_tokens, result.timestamps, strict=True):
        timeline.deliver([token_id], at_s=at - origin)


PEERS: dict[str, Callable[[Any], Contender]] = {
    "hf-generate": lambda model: StaticBatches(model, batch_size=1),  # plain: one request at a time
    "hf-static-8": lambda model: StaticBatches(model, batch_size=8),
    "hf-static-32": lambda model: StaticBatches(model, batch_size=32),
    "hf-continuous": TransformersContinuous,
}
