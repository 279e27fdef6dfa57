"""`vllm bench serve`, vLLM's own client: random prompts at a rate on both endpoints, checked in its saved result."""

from __future__ import annotations

import json
from functools import partial

from benchmarks.clients.checks import BASE_URL, FOLDER, MODEL, OUT, expect, ran, run

NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 64, 64, 32


def load(backend: str, endpoint: str) -> None:
    """Check that all requests complete, each with the requested number of tokens."""
    ran(
        "vllm", "bench", "serve", "--backend", backend, "--base-url", BASE_URL, "--endpoint", endpoint,
        "--model", MODEL, "--tokenizer", FOLDER, "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_PROMPTS), "--request-rate", "16",
        "--ignore-eos", "--save-result", "--save-detailed", "--result-dir", OUT, "--result-filename", f"{backend}.json",
    )  # fmt: skip
    result = json.loads((OUT / f"{backend}.json").read_text())
    expect((result["completed"], result["failed"]) == (NUM_PROMPTS, 0), (result["completed"], result["failed"]))
    expect(result["output_lens"] == [OUTPUT_TOKENS] * NUM_PROMPTS, result["output_lens"])


if __name__ == "__main__":
    run(
        completions=partial(load, "openai", "/v1/completions"),
        chat=partial(load, "openai-chat", "/v1/chat/completions"),
    )
