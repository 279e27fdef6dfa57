"""Measure the gain of predictions: a file is rewritten with a name changed, and its old text is the prediction.

    python -m benchmarks.engine.predictions --model DIR [--file app/engine/scheduler.py --lines 300]
        [--rename sequence=item] [--streams 1 16] [--rounds 3] [--own]

Compares three ways in turn on one loaded model: `without` drafts; with drafts by `lookup` in prompt and output
(`speculation.method: lookup`); with a `prediction` and that setting off. The prompt of all three has the old text.

The text is dictated: the model computes every step, and the token of the edited file replaces each token that the model
draws. So a step takes its usual time, and drafts are accepted as by a model that makes no mistake in the edit; small
models do make mistakes. With `--own`, the model's own tokens count, and all three ways must give equal tokens. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.build import assemble, build_sync_engine
from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import Request, SamplingParams
from app.engine.speculation.drafter import LookupDrafter
from app.model.location import resolve_model_path
from app.text import Tokenizer
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell, where
from benchmarks.harness.figures import table_of
from benchmarks.harness.settings import engine_config
from benchmarks.harness.turns import median_of_ratios, turns

WAYS = ("without", "lookup", "prediction")


class Dictation(ModelRunner):
    """Computes with a model, but draws the tokens of one text for every request and then an end token."""

    def __init__(self, model: ModelRunner, text: Sequence[int], end: int) -> None:
        self._model, self._text, self._end = model, text, end

    def run(self, batch: StepBatch) -> StepResult:
        num_prompt = {each.request.request_id: each.num_prompt_tokens for each in batch.sequences}
        places = [item.end - num_prompt[item.request_id] for item in batch.sampled]
        drawn = [self._text[place] if place < len(self._text) else self._end for place in places]
        return self._model.run(batch)._replace(token_ids=drawn)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure every number of streams. Raises BenchmarkError if two ways give different tokens."""
    tokenizer = Tokenizer.load(resolve_model_path(given.model))
    old, new, prompt = _edit(given, tokenizer)
    request = Request(
        request_id="",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=given.tokens or len(new) + 1, temperature=0.0),
        prediction_token_ids=old,
    )
    tell(f"prompt {len(prompt):,} tokens, prediction {len(old):,}, edited {len(new):,}")
    engines = _engines(given, request, new)
    rows = [_measured(engines, request, streams, given.rounds) for streams in given.streams]
    columns = [
        ("without, tokens/s", "without_tokens_per_s", "{:.1f}"),
        *(
            (f"{way}: ratio", f"{way}_ratio", "{:.2f}") for way in WAYS[1:]
        ),
        ("steps of a stream", "prediction_steps", "{:.0f}"),
        ("accepted", "accepted", "{:.0f}"),
        ("rejected", "rejected", "{:.0f}"),
    ]  # fmt: skip
    print(table_of(columns, rows, streams=[str(row["streams"]) for row in rows]))
    return where() | {"model": given.model, "num_output_tokens": rows[0]["num_output_tokens"], "figures": rows}


def _edit(given: argparse.Namespace, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the file, of the edited file, and of a chat that asks for the edit."""
    name, separator, other = given.rename.partition("=")
    try:
        lines = Path(given.file).read_text(encoding="utf-8").splitlines(keepends=True)[: given.lines]
    except OSError as error:
        raise BenchmarkError(f"--file {given.file} cannot be read: {error.strerror}") from error
    text = "".join(lines)
    edited = re.sub(rf"\b{re.escape(name)}\b", other, text)
    if not separator or edited == text:
        raise BenchmarkError(f"--rename {given.rename}: write OLD=NEW, where OLD is a word of the file")
    asked = f"Write this file again, with the name {name} changed to {other} everywhere, and nothing else:\n\n{text}"
    old, new = (tokenizer.encode(each, add_special_tokens=False) for each in (text, edited))
    return old, new, tokenizer.encode_chat([{"role": "user", "content": asked}])


def _engines(given: argparse.Namespace, request: Request, text: Sequence[int]) -> Mapping[str, Engine]:
    """Return the engine of each way, all on one model; `without` and `prediction` share one. Runs clear prefixes."""
    streams, block_size = max(given.streams), 16
    num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
    config = engine_config(
        {
            "model.path": given.model,
            "model.num_threads": given.threads,
            "cache.num_blocks": streams * (num_tokens // block_size + 2),
            "scheduler.max_running": streams,
        }
    )
    plain = build_sync_engine(config)
    plain.check(request)
    runner = plain.runner if given.own else Dictation(plain.runner, text, plain.model_info.eos_token_ids[0])

    def engine(*, only_predictions: bool) -> Engine:
        return assemble(
            config.scheduler, config.cache, num_blocks=plain.stats().num_blocks, runner=runner,
            model_info=plain.model_info, drafter=LookupDrafter(only_predictions=only_predictions),
        )  # fmt: skip

    off = engine(only_predictions=True)
    return {"without": off, "lookup": engine(only_predictions=False), "prediction": off}


def _measured(engines: Mapping[str, Engine], request: Request, streams: int, rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    counts: dict[str, tuple[int, int, int]] = {}
    outputs: dict[str, list[int]] | None = None
    for number, way in turns(WAYS, rounds=rounds):
        requests = [
            replace(
                request,
                request_id=str(stream),
                prediction_token_ids=request.prediction_token_ids if way == "prediction" else (),
            )
            for stream in range(streams)
        ]
        speed, tokens, counts[way] = _served(engines[way], requests)
        if tokens != (outputs := outputs or tokens):
            raise BenchmarkError(f"{way}, {streams} streams: the tokens differ from the first run")
        speeds[way].append(speed)
        tell(f"{streams} streams, round {number} of {rounds}: {way}: {speed:.1f} tokens/s")
    num_steps, accepted, rejected = counts["prediction"]
    return {
        "streams": streams,
        "num_output_tokens": sum(map(len, outputs.values())) if outputs else 0,
        "without_tokens_per_s": round(statistics.median(speeds["without"]), 2),
        **{f"{way}_ratio": median_of_ratios(speeds[way], speeds["without"]) for way in WAYS[1:]},
        "all_tokens_per_s": {way: [round(each, 2) for each in found] for way, found in speeds.items()},
        "prediction_steps": num_steps,
        "accepted": accepted / streams,
        "rejected": rejected / streams,
    }


def _served(engine: Engine, requests: Sequence[Request]) -> tuple[float, dict[str, list[int]], tuple[int, int, int]]:
    """Return tokens a second, the tokens of each request, and (steps, accepted tokens, rejected tokens).

    The speed and the counts begin when all prompts are computed.
    """
    engine.clear_prefix_cache()
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    accepted = rejected = 0
    for request in requests:
        engine.add(request)
    while not all(tokens.values()):
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
    before, began_at = engine.stats(), time.perf_counter()
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            accepted += delta.num_accepted
            rejected += delta.num_rejected
    seconds, after = time.perf_counter() - began_at, engine.stats()
    speed = (after.total_generated_tokens - before.total_generated_tokens) / seconds
    return speed, tokens, (after.total_steps - before.total_steps, accepted, rejected)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.predictions", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--file", default="app/engine/scheduler.py", help="(app/engine/scheduler.py)")
    parser.add_argument("--lines", type=positive, default=300, metavar="N", help="lines of the file (300)")
    parser.add_argument("--rename", default="sequence=item", metavar="OLD=NEW", help="(sequence=item)")
    parser.add_argument("--tokens", type=positive, metavar="N", help="most tokens of an output (all)")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16], metavar="N", help="streams (1 16)")
    parser.add_argument("--own", action="store_true", help="the model's own tokens count")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="threads of the model (2)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="runs of each way (3)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
