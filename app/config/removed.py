"""Settings of former versions. A config that has any of them is refused, with what to write instead of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# Dotted path in the `args` of an application → what to write instead. `[]` marks a list; `path=value` is a value that
# is gone from a setting that stays.
REMOVED: dict[str, str] = {
    "api.keys": "write the list into a file of its own and name it: api: {keys_file: keys.yaml}",
    "batches.engines": "leave it out: the replicas compute the items of batches, in their lowest class; a large job "
    "gets engines of its own by `python -m deployments.bulk`",
    "batches.files": "leave it out: files are kept in batches.path; mount the storage there, and copy into PATH/files "
    "what the URL has below the name in PATH/files-name",
    "cascades": "a cascade is a step of a pipeline: write pipelines: [{name: ..., steps: [{kind: cascade, small: ..., "
    "large: ..., min_mean_logprob: ...}]}]",
    "models[].engine.cache.prefix_caching": "leave it out: equal beginnings of prompts share KV memory, with "
    "API keys only those of one key",
    "models[].engine.scheduler.policy.preemption": "leave it out: under `priority`, a waiting request may take "
    "the slot of a running one of a lower class",
    "models[].engine.scheduler.strategy.selective": "leave it out; the strategy bucketed with bounds: [64, 1024] "
    "batches short prompts apart from long ones",
    "models[].engine.speculation.max_drafts": "leave it out: up to 8 tokens are drafted, fewer where more do not pay",
    "models[].engine.model.backend=attention": "leave it out: auto takes the fastest code for the model",
    "models[].replicas.autoscaling.target_tokens": "leave it out, or write target_s, seconds of work for each replica: "
    "these tokens divided by the tokens_per_s of a replica in GET /admin/fleet",
}


def refuse_removed(given: object, *, within: str = "") -> None:
    """Raise ValueError with a line for each removed setting.

    `within`: the path at which `given` stands in the `args`, as `models[].engine`.
    """
    mistakes = [line for path, instead in _removed_within(within) for line in _uses(given, path, instead)]
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _removed_within(within: str) -> Iterator[tuple[str, str]]:
    """The rows of the table at or below a path, which their own no longer begin with."""
    scheduler = "models[].engine.scheduler."
    for path, instead in REMOVED.items():
        in_a_group = path.replace(scheduler, "models[].replicas.groups[].scheduler.")
        for each in dict.fromkeys((path, in_a_group)):  # a group of replicas has changes of these settings
            if not within or each.startswith(f"{within}."):
                yield each.removeprefix(f"{within}."), instead


def _uses(given: object, path: str, instead: str) -> Iterator[str]:
    name, equals, value = path.partition("=")
    for place, found in _found(given, re.findall(r"\[\]|[^.\[\]]+", name)):
        if not equals:
            yield f"{place.lstrip('.')}: this setting is gone; {instead}"
        elif found == value:
            yield f"{place.lstrip('.')}: {value!r} is gone; {instead}"


def _found(given: object, parts: list[str], place: str = "") -> Iterator[tuple[str, object]]:
    """Each place that a path leads to, with its value. Goes no deeper than the path: a config may contain itself."""
    if not parts:
        yield place, given
    elif parts[0] == "[]" and isinstance(given, list | tuple):
        for index, each in enumerate(given):
            yield from _found(each, parts[1:], f"{place}[{index}]")
    elif isinstance(given, Mapping) and parts[0] in given:
        yield from _found(given[parts[0]], parts[1:], f"{place}.{parts[0]}")
