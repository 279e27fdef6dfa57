"""OpenVINO GenAI's continuous batching on an exported model. Runs in an environment that has it, not in ours.

The model is a folder that optimum-intel exported, with weights of any width.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.engine.run import MonotonicClock, Run, Timeline
from benchmarks.harness.workload import Workload

CACHE_GIB = 4
MAX_STEP_TOKENS = 2048
_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
_FIRST_TOKEN = 300  # as in benchmarks.make_workload


class OpenVinoGenai:
    """Sends all requests at once, whatever their time of arrival.

    Its prefix cache cannot be emptied, so each run has different tokens.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        import openvino
        import openvino_genai

        precision = _PRECISIONS[given.dtype]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = given.max_running
        scheduler.max_num_batched_tokens = MAX_STEP_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": given.threads,
            "NUM_STREAMS": 1,
        }
        if given.kv != "default":
            properties["KV_CACHE_PRECISION"] = precision if given.kv == "same" else given.kv
        if given.activation_group is not None:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = given.activation_group
        self.version: str = openvino_genai.get_version()
        self.settings = [f"{name}={value}" for name, value in properties.items()]
        self._genai: Any = openvino_genai
        self._tensor: Any = openvino.Tensor
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", properties)
        self._vocab_size = given.vocab
        self._num_runs = 0
        self._next_id = 0

    def serve(self, workload: Workload) -> Run:
        timelines = {timed.request.request_id: Timeline(0.0) for timed in workload.requests}
        prompts = [self._prompt(timed.request.prompt_token_ids) for timed in workload.requests]
        clock = MonotonicClock()
        live = []
        for timed, prompt in zip(workload.requests, prompts, strict=True):
            self._next_id += 1
            handle = self._pipeline.add_request(self._next_id, prompt, self._generation(timed.max_tokens))
            live.append((timelines[timed.request.request_id], handle))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            at_s = clock.now()
            for timeline, handle in live:
                if handle.can_read():
                    for output in handle.read().values():
                        timeline.deliver(list(output.generated_ids), at_s=at_s)
        return Run(seconds=clock.now(), timelines=timelines)

    def forget(self) -> None:
        self._num_runs += 1

    def _prompt(self, token_ids: tuple[int, ...]) -> Any:
        """Return [1, num_tokens], the ids shifted by a different number in each run."""
        num_usual = self._vocab_size - _FIRST_TOKEN
        ids = (torch.tensor([token_ids]) - _FIRST_TOKEN + 7919 * self._num_runs) % num_usual + _FIRST_TOKEN
        return self._tensor(ids.numpy())

    def _generation(self, num_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
        config.max_new_tokens = config.min_new_tokens = num_tokens
        return config
