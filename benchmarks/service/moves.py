"""Measures streams that move to another replica: `python -m benchmarks.service.moves --model PATH`.

Serves a model from two replicas, alternating between with and without `replicas.fetch_prefixes`, which moves KV memory
along. The scene `roles` alternates between one prefill and one decode replica, and no `replicas.prefill_replicas`.
Prints one line of JSON with the figures of both modes:

    leave   streams with long prompts lose their replica before they end. Each stream's longest pause after the change
    short   three streams of one session do not fit on the replica of the session while the other replica is idle.
            Preemptions, seconds until the last stream ends, and the longest times between two tokens
    roles   16 streams with short prompts run while long prompts come one after the other. Times between two tokens of
            the streams, their total rate, and the times to the first token of the long prompts

`different` counts the answers that are not equal in both modes.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from benchmarks.harness.answer import Answer, follow, random_prompt, streamed
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.figures import percentile, rounded
from benchmarks.harness.service import Service, application, scraped, service, total
from benchmarks.harness.turns import turns

_NAME = "moves"
_TIMEOUT_S = 300.0
_DRAIN_S = 4.0  # streams move after three quarters of this time
_LEAVING, _LEAVING_TOKENS = 2, 500
_ROLE_STREAMS, _ROLE_TOKENS, _ROLE_PROMPTS = 16, 300, 4
_SHORT, _SHORT_PROMPT, _SHORT_TOKENS, _SHORT_BLOCKS = 3, 700, 500, 150
_MODES = {"with": True, "without": False}

Figures = dict[str, Any]


def measure(*, model: str, only: Sequence[str], prompt_tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    """Return the figures of the scenes in `only`, or of all scenes if empty, and the number of answers that differ."""
    scenes: dict[str, Callable[..., tuple[list[Answer], Figures]]] = {
        "leave": partial(_leave, prompt_tokens=prompt_tokens),
        "short": _short,
        "roles": partial(_roles, prompt_tokens=prompt_tokens),
    }
    figures: dict[str, Any] = {"model": model, "prompt_tokens": prompt_tokens, "rounds": rounds, "seed": seed}
    said: dict[tuple[str, int], set[str]] = {}
    for name in only or scenes:
        found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in _MODES}
        for number, mode in turns(list(_MODES), rounds=rounds):
            answers, values = scenes[name](model, _MODES[mode], random.Random(seed + number))
            for place, answer in enumerate(answers):
                if not answer.is_complete:
                    raise BenchmarkError(f"{name}: a stream was not answered: {answer.in_words}")
                said.setdefault((f"{name} {number}", place), set()).add(repr(answer.said))
            tell(f"{name}, round {number}, {mode}: {values}")
            found[mode].append(values)
        figures[name] = found
    return figures | {"different": sum(len(each) > 1 for each in said.values())}


def _leave(model: str, fetches: bool, source: random.Random, *, prompt_tokens: int) -> tuple[list[Answer], Figures]:
    bodies = [_body(random_prompt(source, prompt_tokens), _LEAVING_TOKENS) for _ in range(_LEAVING)]
    served = _application(model, fetches, dispatch="round_robin", drain_timeout_s=_DRAIN_S)
    with service(served, with_dashboard=True) as running:
        change = partial(running.deploy, served, num_replicas={f"replica-{_NAME}": 1})
        answers, changed_s = asyncio.run(_followed(running, bodies, then=change))
        pauses = sorted(each.longest_pause_s(changed_s, each.ended_s) for each in answers)
        return answers, {"longest_pauses_s": [round(each, 3) for each in pauses], **_moved(running)}


def _short(model: str, fetches: bool, source: random.Random) -> tuple[list[Answer], Figures]:
    bodies = [_body(random_prompt(source, _SHORT_PROMPT), _SHORT_TOKENS) for _ in range(_SHORT)]
    served = _application(model, fetches, dispatch="prefix_affinity", cache={"num_blocks": _SHORT_BLOCKS})
    with service(served) as running:
        began_s = time.perf_counter()
        answers, _ = asyncio.run(_followed(running, bodies, {"x-carousel-session": "one"}))
        from_s = max(each.events_s[0] for each in answers)  # before that, streams wait for the prefill of other streams
        gaps = [after - before for each in answers for before, after in pairwise(each.events_s) if before > from_s]
        return answers, {
            "preemptions": total(scraped(running.target), "carousel_engine_memory_preemptions_total"),
            "seconds": round(max(each.ended_s for each in answers) - began_s, 2),
            "itl_p99_s": rounded(percentile(gaps, 99)),
            "itl_max_s": round(max(gaps), 3),
            **_moved(running),
        }


def _roles(model: str, has_roles: bool, source: random.Random, *, prompt_tokens: int) -> tuple[list[Answer], Figures]:
    short = [_body(random_prompt(source, 32), _ROLE_TOKENS) for _ in range(_ROLE_STREAMS)]
    long = [_body(random_prompt(source, prompt_tokens), 8) for _ in range(_ROLE_PROMPTS)]
    roles: dict[str, Any] = {"prefill_replicas": 1} if has_roles else {}
    with service(_application(model, True, dispatch="least_loaded", **roles)) as running:
        prompts: list[Answer] = []

        def send_prompts() -> None:
            for body in long:
                answers, _ = asyncio.run(_followed(running, [body]))
                prompts.extend(answers)

        streams, _ = asyncio.run(_followed(running, short, then=send_prompts))
        from_s, to_s = prompts[0].begun_s, prompts[-1].ended_s
        gaps = [
            after - before
            for each in streams
            for before, after in pairwise(each.events_s)
            if before < to_s and after > from_s
        ]
        seconds = max(each.ended_s for each in streams) - min(each.begun_s for each in streams)
        return [*streams, *prompts], {
            "itl_p50_s": rounded(percentile(gaps, 50)),
            "itl_p99_s": rounded(percentile(gaps, 99)),
            "tokens_per_s": round(sum(each.num_tokens for each in streams) / seconds, 1),
            "first_token_s": [round(each.events_s[0] - each.begun_s, 3) for each in prompts],
            **_moved(running),
        }


def _application(
    model: str, fetches: bool, *, cache: Mapping[str, Any] = MappingProxyType({}), **replicas: Any
) -> dict[str, Any]:
    engine = {"model": {"path": model}, "cache": dict(cache)}
    return application(_NAME, engine, {"num_replicas": 2, "fetch_prefixes": fetches, **replicas})


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return streamed(prompt, max_tokens, min_tokens=max_tokens, model=_NAME)


async def _followed(
    running: Service,
    bodies: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str] = MappingProxyType({}),
    *,
    then: Callable[[], None] | None = None,
) -> tuple[list[Answer], float]:
    """Return the answers and when `then` began: after eight events of each stream, as some models' tokens lack text."""
    answers = [Answer(time.perf_counter()) for _ in bodies]
    following = [
        asyncio.create_task(
            follow(answer, running.target, running.target.request("completions", body, headers), timeout_s=_TIMEOUT_S)
        )
        for answer, body in zip(answers, bodies, strict=True)
    ]
    while then is not None:
        await asyncio.sleep(0.05)
        if all(len(each.events_s) >= 8 or each.ended_s for each in answers):
            break
    began_s = time.perf_counter()
    if then is not None:
        await asyncio.to_thread(then)
    await asyncio.gather(*following)
    return answers, began_s


def _moved(running: Service) -> Figures:
    samples = scraped(running.target)
    return {
        "left": total(samples, "carousel_resumes_total"),
        "fetched_tokens": total(samples, "carousel_tier_tokens_total"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.moves", __doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="model folder")
    parser.add_argument("--only", nargs="+", choices=["leave", "short", "roles"], default=[], help="scenes to run")
    parser.add_argument("--prompt-tokens", type=positive, default=2000, metavar="N", help="length of the long prompts")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    return run_command(
        parser,
        lambda given: measure(
            model=given.model, only=given.only, prompt_tokens=given.prompt_tokens, rounds=given.rounds, seed=given.seed
        ),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
