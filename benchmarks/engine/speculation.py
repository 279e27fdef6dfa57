"""Tokens per second with and without speculation: one model serves the same conversations both ways, in turn.

    python -m benchmarks.engine.speculation --model DIR [--streams 32] [--tokens 160] [--rounds 8] [--threads 2]
        [--draft-model DIR [--draft-layers N] [--draft-quantization int4]]

Cases: one stream that repeats a text, one that changes words of it, one that answers questions, `--streams` of these at
once, one stream of JSON by a schema, and `--streams` of that. Copies are greedy, all else is sampled at temperature
0.7. Drafts are looked up, or drawn by a draft model: of `--draft-model` the first `--draft-layers` layers with its norm
and head, and its weights in 8 or 4 bits, where asked. Both ways share the model, and what they generate is compared.
The last line of stdout is one JSON object: for each case the ratio of speeds (median over the rounds, lowest, highest),
tokens per second, and how many tokens were drafted and kept in a run, with the first one, which is not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.assembly import assemble, build_matchers, build_sync_engine, drafter_of, load_runner
from app.config import EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from app.engine.engine import Engine
from app.engine.matcher import Matchers
from app.engine.request import Grammar, GrammarKind, Request, SamplingParams
from app.engine.speculation.draft_model import ModelDrafter
from app.engine.speculation.drafter import Drafter
from app.text import Tokenizer
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.turns import turns

WITHOUT, WITH = "without", "with"
_TEXTS = (
    "The harbour office opens at seven in the morning and closes at nine in the evening. Boats longer than twelve "
    "metres need a berth that was booked the day before. Visitors pay at the red desk beside the stairs, and keep the "
    "ticket until they leave. Dogs are welcome on the pier, but not in the cafe. The ferry to the island leaves from "
    "the second gate every forty minutes, and the last one returns at half past ten.",
    "def total(orders):\n    result = 0\n    for order in orders:\n        if order.cancelled:\n            continue\n"
    "        price = order.price * order.count\n        if order.customer.is_member:\n            price = price * 0.9\n"
    "        result = result + price\n    return result\n\n\ndef largest(orders):\n    best = None\n"
    "    for order in orders:\n        if order.cancelled:\n            continue\n"
    "        if best is None or order.price > best.price:\n            best = order\n    return best\n",
    "Name: Anna Berg, Town: Oslo, Age: 34, Team: north\nName: Tom Hall, Town: Leeds, Age: 51, Team: west\n"
    "Name: Mia Costa, Town: Porto, Age: 28, Team: south\nName: Jan Novak, Town: Brno, Age: 45, Team: east\n"
    "Name: Lea Roth, Town: Basel, Age: 39, Team: north\nName: Omar Said, Town: Cairo, Age: 42, Team: south\n",
)
_WORDS = (  # what the bundled model was trained to repeat
    "apple stone river garden silver window forest candle bridge winter orange",
    "river candle apple bridge stone winter garden forest window orange silver",
    "garden winter stone orange apple silver candle window river forest bridge",
)
_EDITS = (("harbour", "station"), ("order", "item"), ("Town", "City"))
_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "profession": {"enum": ["teacher", "carpenter", "engineer", "musician"]},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "favourite_places": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["first_name", "profession", "year_of_birth", "favourite_places"],
    "additionalProperties": False,
}
_PEOPLE = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _PERSON, "minItems": 100}))
_WANTED = (
    "List people of a small town as JSON, with first_name, profession, year_of_birth and favourite_places of each.",
    "Write a JSON list of the people in a story: first_name, profession, year_of_birth, favourite_places.",
)
_QUESTIONS = (
    "Tell me a story about a fox and a lighthouse.",
    "What should I see in a city that I visit for one day?",
    "Explain how bread is made, step by step.",
    "Why is the sky blue in the day and red in the evening?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Conversations, of which so many run at once."""

    name: str
    prompts: Sequence[str]
    temperature: float = 0.0
    streams: int = 1
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and what reads the grammars of its requests."""

    engine: Engine
    matchers: Matchers


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All cases. Raises BenchmarkError where the two ways give different tokens."""
    config = EngineConfig(
        model=ModelConfig(path=given.model, num_threads=given.threads),
        scheduler=SchedulerConfig(max_running=max(32, given.streams), max_step_tokens=max(512, given.streams)),
        speculation=SpeculationConfig(method="off"),
    )
    plain = build_sync_engine(config)
    speculating = assemble(
        config.scheduler, config.cache, num_blocks=plain.stats().num_blocks, runner=plain.runner, facts=plain.facts,
        drafter=_drafter(given, config, plain),
    )  # fmt: skip
    tokenizer = Tokenizer.load(given.model)
    matchers = build_matchers(config, plain.facts)
    engines = {WITHOUT: Served(plain, matchers), WITH: Served(speculating, matchers)}
    cases = [case for case in _cases(given) if given.cases in case.name]
    found = {case.name: _compared(case, engines, tokenizer, given) for case in cases}
    matchers.close()
    print(_in_words(found))
    return {"cases": found}


def _drafter(given: argparse.Namespace, config: EngineConfig, plain: Engine) -> Drafter | None:
    if given.draft_model is None:
        return drafter_of(SpeculationConfig(method="lookup", max_drafts=given.max_drafts))
    with TemporaryDirectory() as folder:
        path = given.draft_model if given.draft_layers is None else _first_layers(given, Path(folder))
        model = ModelConfig(path=str(path), num_threads=given.threads, quantization=given.draft_quantization)
        cache = config.cache.model_copy(update={"num_blocks": plain.stats().num_blocks})
        draft = load_runner(config.model_copy(update={"model": model, "cache": cache}))
    return ModelDrafter(
        draft.runner, max_drafts=given.max_drafts, max_model_len=draft.model.facts.max_model_len, facts=plain.facts
    )


def _first_layers(given: argparse.Namespace, folder: Path) -> Path:
    """The draft model without its later layers; not trained further."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.draft_model, dtype="auto", num_hidden_layers=given.draft_layers)
    model.save_pretrained(folder)
    return folder


def _cases(given: argparse.Namespace) -> list[Case]:
    if given.words:
        copies = [f"Repeat these words: {words}." for words in _WORDS]
        return [Case(name="copy", prompts=copies), *_chats(given)]
    copies = [f"Repeat the following text exactly, word for word:\n\n{text}" for text in _TEXTS]
    edits = [
        f"Repeat the following text, but replace the word '{old}' by '{new}' everywhere:\n\n{text}"
        for (old, new), text in zip(_EDITS, _TEXTS, strict=True)
    ]
    return [Case(name="copy", prompts=copies), Case(name="edit", prompts=edits), *_chats(given)]


def _chats(given: argparse.Namespace) -> list[Case]:
    crowd = (_QUESTIONS * given.streams)[: given.streams]
    writers = (_WANTED * given.streams)[: given.streams]
    streams = given.streams
    return [
        Case(name="chat", prompts=_QUESTIONS, temperature=0.7),
        Case(name=f"chat, {streams} streams", prompts=crowd, temperature=0.7, streams=streams),
        Case(name="JSON", prompts=_WANTED, temperature=0.7, grammar=_PEOPLE),
        Case(name=f"JSON, {streams} streams", prompts=writers, temperature=0.7, streams=streams, grammar=_PEOPLE),
    ]


def _compared(
    case: Case, engines: dict[str, Served], tokenizer: Tokenizer, given: argparse.Namespace
) -> dict[str, Any]:
    requests = [_request(case, number, tokenizer, given.tokens) for number in range(len(case.prompts))]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    before = engines[WITH].engine.stats()
    generated = {name: _serve(engine, requests, case.streams)[1] for name, engine in engines.items()}  # warm up
    if generated[WITH] != generated[WITHOUT]:
        raise BenchmarkError(f"{case.name}: the tokens with speculation are others than without")
    for number, name in turns(list(engines), rounds=given.rounds):
        took, tokens = _serve(engines[name], requests, case.streams)
        if tokens != generated[WITHOUT]:
            raise BenchmarkError(f"{case.name}, {name}: the tokens of round {number} are others")
        seconds[name].append(took)
        tell(f"{case.name}: round {number} of {given.rounds}: {name}: {took:.3f} s")
    after, num_runs = engines[WITH].engine.stats(), 1 + given.rounds
    num_tokens = sum(map(len, generated[WITH].values()))
    ratios = sorted(slow / fast for slow, fast in zip(seconds[WITHOUT], seconds[WITH], strict=True))
    speeds = {name: round(num_tokens / statistics.median(each), 1) for name, each in seconds.items()}
    return {
        "speed_ratio": round(statistics.median(ratios), 3), "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3), "tokens_per_s": speeds, "num_tokens": num_tokens,
        "drafted_per_run": (after.total_drafted_tokens - before.total_drafted_tokens) / num_runs,
        "kept_per_run": (after.total_accepted_tokens - before.total_accepted_tokens) / num_runs,
    }  # fmt: skip


def _request(case: Case, number: int, tokenizer: Tokenizer, max_tokens: int) -> Request:
    prompt = tokenizer.encode_chat([{"role": "user", "content": case.prompts[number]}])
    sampling = SamplingParams(max_tokens=max_tokens, temperature=case.temperature, seed=number, grammar=case.grammar)
    return Request(request_id=f"{number}", prompt_token_ids=tuple(prompt), sampling=sampling)


def _serve(served: Served, requests: Sequence[Request], streams: int) -> tuple[float, dict[str, list[int]]]:
    """Seconds from the first step to the last, so many requests at a time, and what each generates."""
    engine = served.engine
    engine.clear_prefix_cache()
    matchers = [served.matchers.matcher_of(request).result() for request in requests]
    generated: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began_at = time.perf_counter()
    for start in range(0, len(requests), streams):
        for request, matcher in list(zip(requests, matchers, strict=True))[start : start + streams]:
            engine.add(request, matcher=matcher)
        while engine.has_work:
            for delta in engine.step():
                generated[delta.request_id] += delta.token_ids
    return time.perf_counter() - began_at, generated


def _in_words(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            name, f"{each['speed_ratio']:.2f} ({each['lowest']:.2f} to {each['highest']:.2f})",
            f"{each['tokens_per_s'][WITHOUT]:.1f}", f"{each['tokens_per_s'][WITH]:.1f}",
            f"{each['drafted_per_run']:.0f}", f"{each['kept_per_run']:.0f}", f"{each['num_tokens']}",
        ]
        for name, each in found.items()
    ]  # fmt: skip
    return table(["case", "speed, with / without", "tokens/s without", "with", "drafted", "kept", "tokens"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.speculation", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--words", action="store_true", help="copies are lists of words, as for the bundled model")
    parser.add_argument("--streams", type=positive, default=32, metavar="N", help="conversations at once (32)")
    parser.add_argument("--tokens", type=positive, default=160, metavar="N", help="of an answer, at most (160)")
    parser.add_argument("--max-drafts", type=positive, default=8, metavar="N", help="speculation.max_drafts (8)")
    parser.add_argument("--draft-model", metavar="DIR", help="drafts are this model's, which has the same tokens")
    parser.add_argument("--draft-layers", type=positive, metavar="N", help="its first ones only (all)")
    parser.add_argument("--draft-quantization", choices=("none", "int8", "int4"), default="none", help="(none)")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only those with this in their names (all)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of the model (2)")
    parser.add_argument("--rounds", type=positive, default=8, metavar="N", help="runs each way (8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
