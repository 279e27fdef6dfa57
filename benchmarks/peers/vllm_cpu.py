"""vLLM's CPU build through its own Python interface. Runs in an environment that has `vllm`, not in ours."""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.engine.run import MonotonicClock, Run, Timeline
from benchmarks.harness.workload import Workload

MAX_STEP_TOKENS = 2048
KV_GIB = 4
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class VllmCpu:
    """Compiled vLLM with its prefix cache. Sends all requests at once, whatever their time of arrival."""

    def __init__(self, given: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{given.threads - 1}")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for our figures
        import vllm  # reads the environment when it is imported

        self.version: str = vllm.__version__
        self.settings = [f"max_num_batched_tokens={MAX_STEP_TOKENS}", f"kv_gib={KV_GIB}"]
        self._vllm: Any = vllm
        self._llm: Any = vllm.LLM(
            model=given.model,
            dtype=_DTYPES[given.dtype],
            max_model_len=given.max_model_len,
            max_num_seqs=given.max_running,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            enable_prefix_caching=True,
            disable_log_stats=False,  # provides the times
            seed=0,
        )

    def serve(self, workload: Workload) -> Run:
        prompts = [
            self._vllm.TokensPrompt(prompt_token_ids=list(timed.request.prompt_token_ids))
            for timed in workload.requests
        ]
        sampling = [
            self._vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=timed.max_tokens, detokenize=False)
            for timed in workload.requests
        ]
        clock = MonotonicClock()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = clock.now()
        began_at = min(output.metrics.queued_ts for output in outputs)
        timelines = {
            timed.request.request_id: _timeline(output, began_at)
            for timed, output in zip(workload.requests, outputs, strict=True)
        }
        return Run(seconds=seconds, timelines=timelines)

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


def _timeline(output: Any, began_at: float) -> Timeline:
    """Return the timeline. vLLM reports the first and last token's times; other tokens get equal distances."""
    token_ids = list(output.outputs[0].token_ids)
    first_s, last_s = (at - began_at for at in (output.metrics.first_token_ts, output.metrics.last_token_ts))
    gap_s = (last_s - first_s) / max(1, len(token_ids) - 1)
    timeline = Timeline(0.0)
    for number, token_id in enumerate(token_ids):
        timeline.deliver([token_id], at_s=first_s + number * gap_s)
    return timeline
