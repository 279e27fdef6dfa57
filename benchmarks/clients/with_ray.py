"""Ray's own benchmark of OpenAI-compatible servers: one request, conversations of several turns, a constant rate."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.clients.checks import BASE_URL, FOLDER, MODEL, OUT, expect, ran, run

NUM_TURNS, OUTPUT_TOKENS, INPUT_TOKENS = 3, 8, 64
_BENCHMARK = ("python", "-m", "ray.llm._internal.serve.benchmark", "-u", BASE_URL, "-m", MODEL)
_WORKLOAD = (
    "--tokenizer",
    FOLDER,
    "--isl",
    str(INPUT_TOKENS),
    "--hit-rate",
    "0.6",
    "--osl",
    str(OUTPUT_TOKENS),
    "--seed",
    "1",
)


def one_request() -> None:
    printed = ran(*_BENCHMARK, "--smoke")
    result = json.loads(printed[printed.index("{") :])
    expect(result["input_tokens"] > 0 and result["output_tokens"] > 0, result)


def conversations() -> None:
    saved = OUT / "conversations.json"
    printed = ran(
        *_BENCHMARK, *_WORKLOAD, "--num-turns", str(NUM_TURNS), "--concurrency", "4", "--num-sessions", "8",
        "--warmup-jitter-max", "0.1", "--save-result", saved,
    )  # fmt: skip
    expect("failed" not in printed, printed[-400:])
    result = json.loads(saved.read_text())
    expect(_num_discarded(printed) + result["benchmark"]["total_requests"] == 8 * NUM_TURNS, result["benchmark"])
    _expect_tokens(result)
    lengths = [turn["avg_isl"] for turn in result["per_turn"]]
    expect(len(lengths) == NUM_TURNS and lengths == sorted(set(lengths)), result["per_turn"])


def constant_rate() -> None:
    saved = OUT / "rate.json"
    printed = ran(*_BENCHMARK, *_WORKLOAD, "--request-rate", "8", "--num-sessions", "16", "--save-result", saved)
    expect("failed" not in printed, printed[-400:])
    result = json.loads(saved.read_text())
    expect(result["benchmark"]["total_requests"] == 16, result["benchmark"])
    _expect_tokens(result)


def _num_discarded(printed: str) -> int:
    """Return the number of requests before the steady state, which Ray only prints."""
    words = printed.split(" warmup requests discarded")[0].split()
    return int(words[-1])


def _expect_tokens(result: dict[str, Any]) -> None:
    """Check the tokens in the service's usage. Answers may end early: Ray cannot request exact lengths."""
    for each in result["raw_metrics"]:
        expect(each["input_tokens"] > 0 and 0 < each["output_tokens"] <= OUTPUT_TOKENS, each)


if __name__ == "__main__":
    run(one_request, conversations, constant_rate)
