"""mistral.rs through its Python interface. Runs in an environment that has `mistralrs`, not in ours.

mistral.rs takes text and no token ids, so a prompt of N tokens is made of words of one token each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engine.run import MonotonicClock, Run, Timeline
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import Workload

_DTYPES = {"fp32": "F32", "bf16": "BF16"}


class MistralRs:
    """Sends all requests at once, whatever their time of arrival. Each run has different words."""

    def __init__(self, given: argparse.Namespace) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(given.threads))
        import mistralrs

        self.version = version("mistralrs")
        self.settings = [f"max_seqs={given.max_running}"]
        self._mistralrs: Any = mistralrs
        self._runner: Any = mistralrs.Runner(
            which=mistralrs.Which.Plain(
                model_id=given.model,
                arch=mistralrs.Architecture.Llama,
                dtype=getattr(mistralrs.ModelDType, _DTYPES[given.dtype]),
            ),
            max_seqs=given.max_running,
            token_source="none",
        )
        vocabulary = json.loads((Path(given.model) / "tokenizer.json").read_text())["model"]["vocab"]
        self._words = sorted(piece[1:] for piece in vocabulary if re.fullmatch("Ġ[a-z]{2,}", piece))
        self._random = random.Random(0)
        self._num_more = 0  # tokens added by the chat template
        [(num_prompt, _)] = self._answered([self._request(1, 1)], [Timeline(0.0)], MonotonicClock())
        self._num_more = num_prompt - 1

    def serve(self, workload: Workload) -> Run:
        sizes = [(len(timed.request.prompt_token_ids), timed.max_tokens) for timed in workload.requests]
        requests = [self._request(*size) for size in sizes]
        timelines = [Timeline(0.0) for _ in requests]
        clock = MonotonicClock()
        got = self._answered(requests, timelines, clock)
        seconds = clock.now()
        if got != sizes:
            raise BenchmarkError(f"the sizes of prompts and answers are {got}, not {sizes}")
        ids = [timed.request.request_id for timed in workload.requests]
        return Run(seconds=seconds, timelines=dict(zip(ids, timelines, strict=True)))

    def forget(self) -> None:
        """Do nothing: the next run has different words."""

    def _answered(
        self, requests: Sequence[Any], timelines: Sequence[Timeline], clock: MonotonicClock
    ) -> list[tuple[int, int]]:
        """Return the numbers of tokens of each prompt and answer.

        A streaming call begins its request and returns; any other call blocks the runner from taking more requests.
        """
        streams = [self._runner.send_chat_completion_request(request) for request in requests]
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(partial(_read, clock), streams, timelines))

    def _request(self, num_prompt: int, num_output: int) -> Any:
        words = self._random.choices(self._words, k=num_prompt - self._num_more)
        return self._mistralrs.ChatCompletionRequest(
            messages="".join(f" {word}" for word in words), model="default", max_tokens=num_output, temperature=0.0,
            ignore_eos=True, stream=True,
        )  # fmt: skip


def _read(clock: MonotonicClock, stream: Iterator[Any], timeline: Timeline) -> tuple[int, int]:
    """Return the numbers of prompt and answer tokens. A chunk may have no text, or the text of several tokens."""
    num_delivered, usage = 0, None
    for chunk in stream:
        usage = chunk.usage or usage
        if usage is None:
            timeline.deliver([0], at_s=clock.now())
            num_delivered += 1
    assert usage is not None, "the last chunk has the usage"
    timeline.deliver([0] * (usage.completion_tokens - num_delivered), at_s=clock.now())
    return usage.prompt_tokens, usage.completion_tokens
