"""Settings of former versions. A config with such a setting is refused, or its value is dropped with a warning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# Refused settings: dotted path in the `args` of an application → the replacement. `[]` marks a list. `path=value` is a
# removed value of a setting that still exists.
REMOVED: dict[str, str] = {
    "api.keys": "write the list into a separate file and name the file: api: {keys_file: keys.yaml}",
    "batches.engines": "leave it out: the replicas compute the items of batches, after all other requests; for a large "
    "job with separate engines, use `python -m deployments.bulk`",
    "batches.files": "leave it out: files are stored in batches.path; mount the storage there, and copy the objects "
    "that the URL has below the name in PATH/files-name into PATH/files",
    "pipelines[].steps[].cases[].preset": "name a model of its own for the case: models with the same path may have "
    "different presets",
    "cascades": "a cascade is a step of a pipeline: write pipelines: [{name: ..., steps: [{kind: cascade, small: ..., "
    "large: ..., min_mean_logprob: ...}]}]",
    "models[].engine.cache.prefix_caching": "leave it out: prompts with the same prefix always share KV memory; with "
    "API keys, only the prompts of one key do",
    "models[].engine.scheduler.policy.preemption": "leave it out: under `priority`, a waiting request may take "
    "the slot of a running request of a lower class",
    "models[].engine.scheduler.strategy.batch_size": "write scheduler.max_running, the largest number of requests in a "
    "batch",
    "models[].engine.scheduler.strategy.selective": "leave it out; the strategy bucketed batches short prompts apart "
    "from long prompts",
    "models[].engine.speculation.max_drafts": "leave it out: up to 8 tokens are drafted, fewer if more are not faster",
    "models[].engine.model.require": "write the slowest accepted backend as model.backend; a replica with a named "
    "backend starts with no other",
    "models[].engine.model.backend=attention": "leave it out: auto takes the fastest backend for the model",
    "models[].replicas.roles": "write prefill_replicas, the number of replicas for long prompts; num_replicas counts "
    "all replicas",
    "models[].replicas.silence_timeout_s": "write step_timeout_s: a replica counts as lost after a twentieth of this "
    "time without a sign of life, but at least one second",
    "models[].replicas.autoscaling.target_tokens": "leave it out, or write target_s, seconds of work for each replica: "
    "divide these tokens by the tokens_per_s of a replica in GET /admin/fleet",
}


# Settings that no longer do anything, dropped with a warning until the next release: dotted path → the present rule.
IGNORED: dict[str, str] = {
    "batches.max_in_flight": "half of all slots (max_running) are for the items of batches, 32 to 1,024",
    "models[].engine.cache.num_state_slots": "there are four slots for each sequence of scheduler.max_running, but at "
    "least eight, and at most half of the memory",
    "models[].engine.scheduler.strategy.bounds": "the length classes of the strategy bucketed end at 64, 128, 256 "
    "tokens and so on",
    "models[].engine.scheduler.strategy.max_batch_tokens": "the prompts of a batch of the strategy dynamic have at "
    "most eight times scheduler.max_step_tokens",
    "models[].engine.step_log.max_megabytes": "the step log has at most 1,024 MB",
    "pipelines[].steps[].by": "a route with a header chooses by the header, a route with a classifier by the "
    "conditions of its cases, and any other route by the prompt's length",
}


def without_removed(given: object, *, within: str = "") -> Any:
    """Return `given` without ignored settings, each with a warning, and without removed settings that are null.

    `within`: the path of `given` in the `args`, such as `models[].engine`.
    Raises ValueError with a line for each refused setting.
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
            if value is not None:  # a null asks for nothing; the step logs of former versions have such values
                logger.warning("%s: this setting was removed, and its value has no effect: %s", place, now)
    return given


def _below(within: str, settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table below a path, without that path at the start of their own paths."""
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
    """Yield each place of a path, with the branch and the name there.

    The path limits the depth, because a config may contain itself.
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
