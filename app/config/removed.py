"""Settings of earlier versions. A config that contains one is rejected, or the setting is ignored with a warning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# Replacements of rejected settings, by their dotted path in the `args` of an application. `[]` marks a list, and
# `path=value` a removed value of a setting that still exists.
REMOVED: dict[str, str] = {
    "api.keys": "move the list to a separate file, and name that file: api: {keys_file: keys.yaml}",
    "batches.engines": "leave it out: the replicas compute batch items after all other requests; for a large job on "
    "separate engines, use `python -m deployments.bulk`",
    "batches.files": "leave it out: files are stored in batches.path; mount the storage there, and copy the objects "
    "below URL/NAME to PATH/files, where NAME is the content of PATH/files-name",
    "pipelines[].steps[].cases[].preset": "give the case a model of its own: several models may have the same path and "
    "different presets",
    "cascades": "a cascade is a step of a pipeline: write pipelines: [{name: ..., steps: [{kind: cascade, small: ..., "
    "large: ..., min_mean_logprob: ...}]}]",
    "models[].engine.cache.prefix_caching": "leave it out: prompts with the same prefix always share KV memory; with "
    "API keys, only the prompts of one key do",
    "models[].engine.scheduler.policy.preemption": "leave it out: under `priority`, a waiting request may take "
    "the slot of a running request with a lower class",
    "models[].engine.scheduler.strategy.batch_size": "set scheduler.max_running, the maximum number of requests in a "
    "batch",
    "models[].engine.scheduler.strategy.selective": "leave it out: the strategy bucketed batches short and long "
    "prompts separately",
    "models[].engine.speculation.max_drafts": "leave it out: up to 8 tokens are drafted, or fewer if that is faster",
    "models[].engine.model.require": "set model.backend to the slowest acceptable backend; if a backend is named, no "
    "other is tried",
    "models[].engine.model.backend=attention": "leave it out: the default is the fastest backend for the model",
    "models[].replicas.roles": "set prefill_replicas, the number of replicas for long prompts; num_replicas counts "
    "all replicas",
    "models[].replicas.silence_timeout_s": "set step_timeout_s: a replica that is silent for a twentieth of that time, "
    "at least one second, counts as lost",
    "models[].replicas.autoscaling.target_tokens": "leave it out, or set target_s, the seconds of work per replica: "
    "divide the tokens by a replica's tokens_per_s in GET /admin/fleet",
}


# Settings without effect, which are ignored with a warning until the next release: the present rule, by dotted path.
IGNORED: dict[str, str] = {
    "batches.max_in_flight": "batch items may use half of all slots (max_running), but at least 32 and at most 1,024",
    "models[].engine.cache.num_state_slots": "the engine has four times scheduler.max_running slots, but at least "
    "eight, and they may use at most half of the memory",
    "models[].engine.scheduler.strategy.bounds": "the length classes of the strategy bucketed end at 64, 128, 256 "
    "tokens and so on",
    "models[].engine.scheduler.strategy.max_batch_tokens": "with the strategy dynamic, the prompts of a batch may have "
    "eight times scheduler.max_step_tokens",
    "models[].engine.step_log.max_megabytes": "the step log is limited to 1,024 MB",
    "pipelines[].steps[].by": "a route with a header chooses by the header, a route with a classifier by the "
    "conditions of its cases, and any other route by the prompt's length",
}


def without_removed(given: object, *, within: str = "") -> Any:
    """Return `given` without ignored settings, for which it logs warnings, and without removed settings that are null.

    `within` is the path of `given` in the `args`, such as `models[].engine`. Raises ValueError for rejected settings.
    """
    mistakes = [line for path, instead in _below(within, REMOVED) for line in _uses(given, path, instead)]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    found = [
        (path, now) for path, now in _below(within, REMOVED | IGNORED) if "=" not in path and any(_found(given, path))
    ]
    given = copy.deepcopy(given) if found else given
    for path, now in found:
        for place, branch, name in _found(given, path):
            value = branch.pop(name)
            if value is not None:  # null has no effect; the step logs of earlier versions contain such values
                logger.warning("%s: this setting was removed, and its value has no effect: %s", place, now)
    return given


def _below(within: str, settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a table's rows below a path, with their paths relative to that path."""
    scheduler = "models[].engine.scheduler."
    for path, instead in settings.items():
        in_a_group = path.replace(scheduler, "models[].replicas.groups[].scheduler.")
        for each in dict.fromkeys((path, in_a_group)):  # a group of replicas may override the scheduler's settings
            if not within or each.startswith(f"{within}."):
                yield each.removeprefix(f"{within}."), instead


def _uses(given: object, path: str, instead: str) -> Iterator[str]:
    path, equals, value = path.partition("=")
    for place, branch, name in _found(given, path):
        if not equals and branch[name] is not None:
            yield f"{place}: this setting was removed; {instead}"
        elif equals and branch[name] == value:
            yield f"{place}: {value!r} was removed; {instead}"


def _found(given: object, path: str, place: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each occurrence of a path: its full path, its branch and its name.

    The path bounds the depth of the recursion, because a config may contain itself.
    """
    name, dot, below = path.partition(".")
    name, is_list = name.removesuffix("[]"), name.endswith("[]")
    if not isinstance(given, dict) or name not in given:
        return
    if not dot:
        yield f"{place}{name}", given, name
    elif not is_list:
        yield from _found(given[name], below, f"{place}{name}.")
    elif isinstance(given[name], list | tuple):
        for index, each in enumerate(given[name]):
            yield from _found(each, below, f"{place}{name}[{index}].")
