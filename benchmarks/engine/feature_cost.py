"""What a feature costs: one model serves the same requests with it and without it, in turn.

    python -m benchmarks.engine.feature_cost logprobs --model DIR --workload FILE.jsonl [--top 5] [--prompts]
    python -m benchmarks.engine.feature_cost step_log --model DIR --workload FILE.jsonl --step-log FOLDER
    python -m benchmarks.engine.feature_cost structured_output --model DIR [--batch 32] [--tokens 128]

Whole processes differ by more than a feature costs, so all runs share one model in one process, and every round has
each of them, in the opposite order in every second round. `structured_output`: the grammars go on for longer than the
tokens that are asked for, so all runs compute the same: a batch of equal prompts, sampled at temperature 1. CPU time is
measured as well: with `--threads 1` it is the cost on a machine that others use too. The last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from app.assembly import assemble_recorded, build_matchers, build_sync_engine
from app.config import EngineConfig, ModelConfig, SchedulerConfig, StepLogConfig
from app.engine.engine import Engine
from app.engine.matcher import Matchers
from app.engine.request import Grammar, GrammarKind, Request, SamplingParams
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import LoadedEngine, load_engine
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.options import Options, add_run_options
from benchmarks.harness.turns import median_of_ratios, turns
from benchmarks.harness.workload import TimedRequest, Workload

WITHOUT, WITH = "without", "with"
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
_TAG = {"trigger": "<tool_call>", "is_opening": False, "content": [{"schema": 0}], "is_last": False}
GRAMMARS = {
    WITHOUT: None,
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _RECORD, "minItems": 1000})),
    "any object": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "object"}, "minItems": 1000}'),
    "regex": Grammar(GrammarKind.REGEX, r"([A-Z][a-z]{1,15}(,? [a-z]{1,15}){2,20}\. ){1000}"),
    "free until a tag": Grammar(
        GrammarKind.TAGS, json.dumps({"schemas": [{"schema": _RECORD, "is_lenient": False}], "tags": [_TAG]})
    ),
}

Runs = Mapping[str, Callable[[int], float]]  # by name: makes a run, given the round, and returns its seconds


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), lambda given: given.measure(given), arguments)


def logprobs(given: argparse.Namespace) -> dict[str, Any]:
    """Requests that all ask for log-probabilities, against the same requests without."""
    loaded = load_engine(Options.of(given))
    asking = asking_workload(loaded.workload, num_top=given.top, prompts=given.prompts)
    contender = Carousel(loaded.engine)
    return in_turn(
        {WITHOUT: _serving(contender, loaded.workload), WITH: _serving(contender, asking)}, rounds=given.rounds
    )


def step_log(given: argparse.Namespace) -> dict[str, Any]:
    """An engine that writes a step log against one that does not, both on the same model."""
    loaded = load_engine(Options.of(given))
    recording = recording_engine(loaded, given.step_log)
    contenders = {WITHOUT: Carousel(loaded.engine), WITH: Carousel(recording)}
    runs = {name: _serving(contender, loaded.workload) for name, contender in contenders.items()}
    found = in_turn(runs, rounds=given.rounds)
    writer_s = writer_cpu_s()
    recording.close()
    return found | {"writer_cpu_share": round(writer_s / sum(found["seconds"][WITH]), 6)}


def structured_output(given: argparse.Namespace) -> dict[str, Any]:
    """Each kind of grammar against free text of the same number of tokens."""
    config = EngineConfig(
        model=ModelConfig(path=given.model, num_threads=given.threads),
        scheduler=SchedulerConfig(max_running=given.batch, max_step_tokens=max(512, given.batch)),
    )
    engine = build_sync_engine(config)
    matchers = build_matchers(config, engine.facts)

    def generating(grammar: Grammar | None) -> Callable[[int], float]:
        return partial(generate, engine, matchers, grammar, batch=given.batch, tokens=given.tokens)

    found = in_turn({name: generating(grammar) for name, grammar in GRAMMARS.items()}, rounds=given.rounds)
    matchers.close()
    return found | {"vocab_size": engine.facts.vocab_size}


def in_turn(runs: Runs, *, rounds: int) -> dict[str, Any]:
    """Warm up, then all runs once a round: the seconds of each, and the median ratios to those without the feature."""
    for run in runs.values():
        run(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_s: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in turns(list(runs), rounds=rounds):
        began_s = time.process_time()
        seconds[name].append(round(runs[name](number), 4))
        cpu_s[name].append(round(time.process_time() - began_s, 4))
        tell(f"round {number} of {rounds}: {name}: {seconds[name][-1]} s")
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "ratio": {name: median_of_ratios(each, seconds[WITHOUT]) for name, each in seconds.items() if name != WITHOUT},
        "cpu_ratio": {name: median_of_ratios(each, cpu_s[WITHOUT]) for name, each in cpu_s.items() if name != WITHOUT},
    }


def _serving(contender: Carousel, workload: Workload) -> Callable[[int], float]:
    def run(number: int) -> float:
        contender.forget()
        return contender.serve(workload if number else workload.warm_up()).seconds

    return run


def asking_workload(workload: Workload, *, num_top: int, prompts: bool) -> Workload:
    """The same requests, each of which asks for log-probabilities."""

    def asking(timed: TimedRequest) -> TimedRequest:
        sampling = replace(timed.request.sampling, logprobs=num_top, prompt_logprobs=num_top if prompts else None)
        return replace(timed, request=replace(timed.request, sampling=sampling))

    return replace(workload, requests=tuple(map(asking, workload.requests)))


def recording_engine(loaded: LoadedEngine, folder: str) -> Engine:
    """The same model and settings behind another engine, which keeps a log."""
    config = loaded.config.model_copy(update={"step_log": StepLogConfig(path=folder)})
    engine = loaded.engine
    return assemble_recorded(config, num_blocks=engine.stats().num_blocks, runner=engine.runner, facts=engine.facts)


def writer_cpu_s() -> float:
    """CPU seconds of the threads that write step logs, so far."""
    writers = [thread.ident for thread in threading.enumerate() if thread.name == "step log"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in writers if ident is not None)


def generate(
    engine: Engine, matchers: Matchers, grammar: Grammar | None, seed: int, *, batch: int, tokens: int
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


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.feature_cost", __doc__)
    features = parser.add_subparsers(required=True, metavar="FEATURE")
    asked = features.add_parser("logprobs", help="log-probabilities")
    asked.add_argument("--top", type=int, default=5, metavar="N", help="likeliest tokens with each (5)")
    asked.add_argument("--prompts", action="store_true", help="of the prompts too, which reads no prefix cache")
    logged = features.add_parser("step_log", help="the record of every step")
    logged.add_argument("--step-log", required=True, metavar="FOLDER", help="where the log is written")
    for feature, measure in ((asked, logprobs), (logged, step_log)):
        add_run_options(feature, settings=True)
        feature.set_defaults(measure=measure)
    formed = features.add_parser("structured_output", help="schemas, regular expressions, tags")
    formed.add_argument("--model", required=True, metavar="DIR")
    formed.add_argument("--batch", type=positive, default=32, metavar="N", help="requests at once (32)")
    formed.add_argument("--tokens", type=positive, default=128, metavar="N", help="that each generates (128)")
    formed.add_argument("--threads", type=positive, default=1, metavar="N", help="of the model (1)")
    formed.set_defaults(measure=structured_output)
    for feature in (asked, logged, formed):
        feature.add_argument("--rounds", type=positive, default=8, metavar="N", help="runs of each kind (8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
