"""The peer that batches as we do: transformers' own continuous batching, through its manager."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from app.model.ways.transformers_code import eos_token_ids
from benchmarks.engine.run import MonotonicClock, Run, Timeline
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import TimedRequest, Workload

PAGE_SIZE = 32
MAX_STEP_TOKENS = 512
MAX_RUNNING = 64
NO_EOS = -1  # what its manager takes for "never"
_PATIENCE_S = 1.0  # a result is awaited by event; this often it is also asked whether the thread lives


class TransformersContinuous:
    """A fresh manager, and with it an empty cache, for every run. Its start and its cache are not timed.

    On a CPU its cache gets room for the whole workload; on a GPU it sizes itself, captures its graphs and takes flash
    attention where that is installed.
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
        """Every run has its own manager."""

    def _make_cache(self, manager: Any) -> None:
        """The first request makes the manager's thread allocate its cache."""
        manager.add_request(input_ids=[0], request_id="cache", max_new_tokens=1, eos_token_id=NO_EOS)
        while _next_result(manager, _PATIENCE_S) is None:
            pass

    def _serve(self, manager: Any, workload: Workload) -> Run:
        timelines = {timed.request.request_id: Timeline(timed.arrival_s) for timed in workload.requests}
        arriving = deque(workload.requests)
        num_open = len(workload.requests)
        origin = time.perf_counter()  # the manager's timestamps are of this clock
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
    # Its name in transformers 5.17 is another one.
    page_size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    return ContinuousBatchingConfig(
        **{page_size: PAGE_SIZE},
        num_blocks=sum(timed.max_total_tokens // PAGE_SIZE + 2 for timed in workload.requests),
        max_batch_tokens=MAX_STEP_TOKENS,
        max_requests_per_batch=MAX_RUNNING,
        max_blocks_per_request=0,
    )


def _next_result(manager: Any, patience_s: float) -> Any:
    """The next finished request, or None when none came in time."""
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
