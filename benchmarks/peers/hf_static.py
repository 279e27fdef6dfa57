"""Transformers' `generate` on padded batches that run until their longest request is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from app.model.ways.transformers_code import eos_token_ids
from benchmarks.engine.run import MonotonicClock, Run, Timeline
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import TimedRequest, Workload


class StaticBatches:
    """Batches of a fixed size in order of arrival; a batch starts when its last request is there."""

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
        """Nothing is kept between batches."""

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
    """Token ids and mask, both [num_prompts, longest], padded with 0 on the left."""
    width = max(len(prompt) for prompt in prompts)
    token_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return token_ids, mask


def own_tokens(row: list[int], max_tokens: int, stops: Sequence[int]) -> list[int]:
    """What a request asked for of its row: the batch went on until the longest was done."""
    row = row[:max_tokens]
    end = next((index for index, token in enumerate(row) if token in stops), None)
    return row if end is None else row[: end + 1]
