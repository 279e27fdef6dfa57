"""llama.cpp's own measure of batches, `llama-batched-bench`, on a GGUF file.

It computes prompts and steps but draws no tokens, so it does less work than the other engines. All of its requests have
one length. `llama_batched.py` in this folder is a similar program for people who have llama.cpp as a library.
"""

from __future__ import annotations

import argparse
import shlex

from benchmarks.engine.run import Run, Timeline
from benchmarks.harness.command import BenchmarkError, ran
from benchmarks.harness.turns import last_object
from benchmarks.harness.workload import Workload

MAX_STEP_TOKENS = 2048


class LlamaCpp:
    """Starts a process for each run; the times that the process reports become the timelines."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.version = "llama.cpp"
        self.settings = [f"-b {MAX_STEP_TOKENS}"]
        self._command = [
            *shlex.split(given.program), "-m", given.model, "-t", str(given.threads), "-tb", str(given.threads),
            "-b", str(MAX_STEP_TOKENS), "-ngl", "0", "--output-format", "jsonl",
        ]  # fmt: skip

    def serve(self, workload: Workload) -> Run:
        sizes = {(timed.num_prompt_tokens, timed.max_tokens) for timed in workload.requests}
        if len(sizes) != 1:
            raise BenchmarkError("llama-batched-bench serves only requests of one length; this workload has several")
        (num_prompt, num_output), num_at_once = sizes.pop(), len(workload.requests)
        found = self._measured(num_prompt, num_output, num_at_once)
        # llama.cpp counts the token after a prompt as a step, so all steps come after the prompts.
        gap_s = found["t_tg"] / num_output
        timelines = {timed.request.request_id: Timeline(0.0) for timed in workload.requests}
        for timeline in timelines.values():
            timeline.deliver([0], at_s=found["t_pp"])
            for number in range(1, num_output):
                timeline.deliver([0], at_s=found["t_pp"] + number * gap_s)
        return Run(seconds=found["t_pp"] + (num_output - 1) * gap_s, timelines=timelines)

    def forget(self) -> None:
        """Do nothing: every run has its own process."""

    def _measured(self, num_prompt: int, num_output: int, num_at_once: int) -> dict[str, float]:
        """Return the figures: `t_pp` seconds for all prompts, `t_tg` seconds for a step per output token."""
        sizes = ["-npp", str(num_prompt), "-ntg", str(num_output), "-npl", str(num_at_once)]
        context = ["-c", str(num_at_once * (num_prompt + num_output))]
        lines = ran([*self._command, *context, *sizes]).splitlines()
        return last_object("\n".join(line for line in lines if line.startswith("{")))
