"""guidellm: concurrent streams with synthetic prompts on both endpoints, checked in the report that guidellm writes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from benchmarks.clients.checks import BASE_URL, FOLDER, MODEL, OUT, expect, ran, run

NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 64, 64, 32


def load(endpoint: str) -> None:
    """Check that 64 requests complete without errors, each with the requested number of tokens."""
    saved = OUT / f"{endpoint.strip('/').replace('/', '-')}.json"
    ran(
        "guidellm", "run", "--backend", f"kind=openai_http,target={BASE_URL},model={MODEL},request_format={endpoint}",
        "--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--tokenizer", f"kind=huggingface_auto,model={FOLDER}", "--output", f"kind=json,path={saved}",
        "--disable-console-interactive",
    )  # fmt: skip
    [benchmark] = json.loads(saved.read_text())["benchmarks"]
    requests: dict[str, list[dict[str, Any]]] = benchmark["requests"]
    counts = {kind: len(each) for kind, each in requests.items() if kind != "total" and each}
    expect(counts == {"successful": NUM_REQUESTS}, counts)
    lengths = {each["output_tokens"] for each in requests["successful"]}
    expect(lengths == {OUTPUT_TOKENS}, lengths)


if __name__ == "__main__":
    run(completions=partial(load, "/v1/completions"), chat=partial(load, "/v1/chat/completions"))
