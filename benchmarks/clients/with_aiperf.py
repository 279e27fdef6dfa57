"""aiperf (NVIDIA): a load whose numbers are all known beforehand, then a load with cancelled requests."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.clients.checks import BASE_URL, FOLDER, MODEL, OUT, expect, ran, run

os.environ.pop("HF_HUB_OFFLINE", None)  # if set, aiperf 0.13 takes a folder's path for a repository's name

NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 64, 64, 32
NUM_CUT, CUT_OUTPUT_TOKENS = 60, 256
_PROFILE = (
    "aiperf", "profile", "--model", MODEL, "--url", BASE_URL, "--streaming", "--tokenizer", FOLDER,
    "--random-seed", "1", "--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--extra-inputs", "ignore_eos:true",
    "--ui", "none", "--no-gpu-telemetry", "--use-server-token-count",
)  # fmt: skip


def load(kind: str) -> None:
    """Check that all requests are answered, in the requested lengths."""
    folder = OUT / kind
    ran(*_PROFILE, "--endpoint-type", kind, "--concurrency", "8", "--request-count", str(NUM_REQUESTS),
        "--output-tokens-mean", str(OUTPUT_TOKENS), "--artifact-dir", folder)  # fmt: skip
    summary = _summary(folder)
    expect(summary["request_count"]["avg"] == NUM_REQUESTS, summary["request_count"])
    expect(not summary.get("error_request_count", {}).get("avg"), summary.get("error_summary"))
    lengths = summary["output_sequence_length"]
    expect(lengths["min"] == lengths["max"] == OUTPUT_TOKENS, lengths)
    records = _records(folder)
    expect(len(records) == NUM_REQUESTS and all(not each.get("error") for each in records), len(records))


def cut_off() -> None:
    """Check that requests are answered whole while the client cancels others, and afterwards."""
    folder = OUT / "cut"
    ran(*_PROFILE, "--endpoint-type", "chat", "--concurrency", "16", "--request-count", str(NUM_CUT),
        "--output-tokens-mean", str(CUT_OUTPUT_TOKENS), "--request-cancellation-rate", "30",
        "--request-cancellation-delay", "0.05", "--artifact-dir", folder)  # fmt: skip
    records = _records(folder)
    cut = [each for each in records if each["metadata"].get("was_cancelled")]
    whole = [each for each in records if not each["metadata"].get("was_cancelled")]
    expect(0 < len(cut) < NUM_CUT and len(cut) + len(whole) == NUM_CUT, (len(cut), len(whole)))
    expect(all(not each.get("error") for each in whole), [each["error"] for each in whole if each.get("error")])
    lengths = {each["metrics"]["output_sequence_length"]["value"] for each in whole}
    expect(lengths == {CUT_OUTPUT_TOKENS}, lengths)


def the_services_own_numbers() -> None:
    """Check that aiperf scraped /metrics itself during a load."""
    metrics = json.loads((OUT / "chat" / "server_metrics_export.json").read_text())
    expect(any(name.startswith("vllm:") for name in metrics["metrics"]), list(metrics))


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "profile_export_aiperf.json").read_text())  # type: ignore[no-any-return]


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    run(cut_off, the_services_own_numbers, chat=partial(load, "chat"), completions=partial(load, "completions"))
