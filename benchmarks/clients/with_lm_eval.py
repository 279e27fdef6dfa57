"""lm-eval (EleutherAI's harness): the same tasks through the service and with the same weights in its own process.

Its model `hf` is the oracle. Log-likelihoods must agree within 1e-4 for every choice of every question, or within a
millionth of their value if that is larger. Generated texts and scores must be equal. Both sides compute in float32,
which rounds a sum of -500 to 2e-4 (`tests/test_log_likelihoods.py`). One process runs all tasks, because the import of
torch takes longer than the tasks.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from benchmarks.clients.checks import BASE_URL, FOLDER, MODEL, expect, run, tell

TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-6
CHOICE, GENERATION = "carousel_choice", "carousel_generation"
NUM_QUESTIONS = 30
_COMPLETIONS = f"model={MODEL},base_url={BASE_URL}/v1/completions,max_retries=1"
_LOCAL = f"pretrained={FOLDER},dtype=float32"
_LOCAL_TOKENIZER = f"tokenizer_backend=huggingface,tokenizer={FOLDER},num_concurrent=4"

Samples = dict[str, list[dict[str, Any]]]  # by task, in the questions' order


def agree(model: str, where: str, tasks: tuple[str, ...] = (CHOICE, GENERATION), *, has_template: bool = False) -> None:
    """Check that the service gives the results that the same weights give without the service."""
    found, expected = evaluated(model, where, tasks, has_template), by_itself(has_template)
    for task in tasks:
        expect(len(found[task]) == len(expected[task]) == NUM_QUESTIONS, (task, len(found[task])))
        if task == CHOICE:
            tell(_differences(found[task], expected[task]))
        for ours, theirs in zip(found[task], expected[task], strict=True):
            expect(ours["doc"] == theirs["doc"], (task, ours, theirs))
            (_agree_in_choices if task == CHOICE else _agree_in_text)(ours, theirs)


@cache
def by_itself(has_template: bool) -> Samples:
    return evaluated("hf", _LOCAL, (CHOICE, GENERATION), has_template, device="cpu")


def evaluated(model: str, where: str, tasks: tuple[str, ...], has_template: bool, **more: Any) -> Samples:
    results = lm_eval.simple_evaluate(
        model=model, model_args=where, tasks=list(tasks), apply_chat_template=has_template, log_samples=True,
        task_manager=TaskManager(include_path="benchmarks/clients/lm_eval_tasks", include_defaults=False), **more,
    )  # fmt: skip
    return {task: sorted(results["samples"][task], key=lambda sample: sample["doc_id"]) for task in tasks}


def _agree_in_choices(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare (log-likelihood, is greedy) of each choice, and the score of the question."""
    pairs = list(zip(_likelihoods(ours), _likelihoods(theirs), strict=True))
    expect(len(pairs) == len(ours["doc"]["choices"]), ours)
    for (value, is_greedy), (expected, is_greedy_there) in pairs:
        bound = max(TOLERANCE, RELATIVE_TOLERANCE * abs(expected))
        expect(abs(value - expected) <= bound and is_greedy == is_greedy_there, (ours["doc"], value, expected))
    expect(all(ours[metric] == theirs[metric] for metric in ("acc", "acc_norm")), (ours, theirs))


def _agree_in_text(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    expect(ours["resps"] == theirs["resps"], (ours["doc"]["question"], ours["resps"], theirs["resps"]))
    expect(ours["exact_match"] == theirs["exact_match"], (ours, theirs))


def _differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    both = zip(ours, theirs, strict=True)
    pairs = (pair for mine, other in both for pair in zip(_likelihoods(mine), _likelihoods(other), strict=True))
    found = [(abs(value - expected), expected) for (value, _), (expected, _) in pairs]
    most, where = max(found)
    num_within = sum(difference <= TOLERANCE for difference, _ in found)
    return f"{num_within} of {len(found)} log-likelihoods within 1e-4; {most:.1e} at most, of {where:.0f}"


def _likelihoods(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    return [(float(value), str(is_greedy) == "True") for [[value, is_greedy]] in sample["resps"]]


if __name__ == "__main__":
    api, chat_url = "local-completions", f"model={MODEL},base_url={BASE_URL}/v1/chat/completions,max_retries=1"
    run(
        token_ids_in_batches=partial(agree, api, f"{_COMPLETIONS},{_LOCAL_TOKENIZER},batch_size=8"),
        one_by_one_with_a_chat_template=partial(agree, api, f"{_COMPLETIONS},{_LOCAL_TOKENIZER}", has_template=True),
        with_the_services_tokenizer=partial(agree, api, f"{_COMPLETIONS},tokenizer_backend=remote,num_concurrent=4"),
        chat=partial(agree, "local-chat-completions", f"{chat_url},num_concurrent=4", (GENERATION,), has_template=True),
    )
