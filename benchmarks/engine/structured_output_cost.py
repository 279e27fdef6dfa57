"""What structured output costs: one engine generates the same number of tokens freely and by grammars, in turn.

    python -m benchmarks.engine.structured_output_cost --model DIR [--batch 32] [--tokens 128] [--rounds 5]

Every grammar goes on for longer than the tokens that are asked for, so all runs compute the same: a batch of equal
prompts, sampled at temperature 1, that many tokens each. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from app.assembly import build_matchers, build_sync_engine
from app.config import EngineConfig, ModelConfig, SchedulerConfig
from app.engine.engine import Engine
from app.engine.matcher import Matchers
from app.engine.request import Grammar, GrammarKind, Request, SamplingParams
from app.errors import CarouselError
from app.versions import commit
from benchmarks.harness.errors import BenchmarkError, refused
from benchmarks.harness.machine import cpu_name
from benchmarks.harness.options import positive
from benchmarks.harness.progress import tell

PROMPT_TOKENS = 32
FIRST_TOKEN = 40
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing", "idea"]},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "notes": {"type": "array", "items": {"type": "string", "minLength": 10}, "minItems": 3},
    },
    "required": ["name", "kind", "year", "notes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "free": None,
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _RECORD, "minItems": 1000})),
    "any object": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "object"}, "minItems": 1000}'),
    "regex": Grammar(GrammarKind.REGEX, r"([A-Z][a-z]{1,15}(,? [a-z]{1,15}){2,20}\. ){1000}"),
    "free until a tag": Grammar(
        GrammarKind.TAGS,
        json.dumps(
            {
                "schemas": [{"schema": _RECORD, "is_lenient": False}],
                "tags": [
                    {"trigger": "<tool_call>", "is_opening": False, "content": [{"schema": 0}], "is_last": False},
                ],
            }
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.structured_output_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--batch", type=positive, default=32, metavar="N", help="requests at once (32)")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="that each generates (128)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="runs of each kind (5)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="of the model (1)")
    given = parser.parse_args(arguments)
    try:
        print(json.dumps(measure(given)), flush=True)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return 0


def measure(given: argparse.Namespace) -> dict[str, object]:
    """Seconds of every run, and each kind's median as a multiple of the free ones'."""
    config = EngineConfig(
        model=ModelConfig(path=given.model, num_threads=given.threads),
        scheduler=SchedulerConfig(max_running=given.batch, max_step_tokens=max(512, given.batch)),
    )
    engine = build_sync_engine(config)
    matchers = build_matchers(config, engine.facts)
    seconds: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    for number in range(given.rounds + 1):  # the first is to warm up
        names = list(GRAMMARS)
        for name in names if number % 2 else reversed(names):
            took = generate(engine, matchers, GRAMMARS[name], batch=given.batch, tokens=given.tokens, seed=number)
            if number:
                seconds[name].append(round(took, 4))
        tell(f"round {number} of {given.rounds}: { ({name: each[-1:] for name, each in seconds.items()}) }")
    matchers.close()
    free = seconds["free"]
    ratios = {
        name: [one / other for one, other in zip(each, free, strict=True)]
        for name, each in seconds.items()
        if name != "free"
    }
    return {
        "seconds": seconds,
        "free_tokens_per_s": round(given.batch * given.tokens / statistics.median(free), 1),
        "median_of_ratios": {name: round(statistics.median(each), 4) for name, each in ratios.items()},
        "model": given.model,
        "batch": given.batch,
        "tokens": given.tokens,
        "threads": given.threads,
        "vocab_size": engine.facts.vocab_size,
        "cpu": cpu_name(),
        "commit": commit(),
    }


def generate(
    engine: Engine, matchers: Matchers, grammar: Grammar | None, *, batch: int, tokens: int, seed: int
) -> float:
    """Seconds from the first step to the last; grammars are compiled before."""
    for index in range(batch):
        is_free = grammar is None or grammar.kind is GrammarKind.TAGS
        sampling = SamplingParams(max_tokens=tokens, seed=seed * batch + index, ignore_eos=is_free, grammar=grammar)
        prompt = tuple(range(FIRST_TOKEN, FIRST_TOKEN + PROMPT_TOKENS))
        request = Request(request_id=f"{index}", prompt_token_ids=prompt, sampling=sampling)
        engine.add(request, matcher=matchers.matcher_of(request).result())
    num_tokens = 0
    began_at = time.perf_counter()
    while engine.has_work:
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    took = time.perf_counter() - began_at
    if num_tokens != batch * tokens:
        raise BenchmarkError(f"{num_tokens:,} tokens were generated; {batch * tokens:,} were asked for")
    return took


if __name__ == "__main__":
    sys.exit(main())
