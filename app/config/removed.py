"""Settings of former versions. A config with such a setting is refused; the message says how to replace the setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# Dotted path in the `args` of an application → the replacement. `[]` marks a list. `path=value` is a removed value of a
# setting that still exists.
REMOVED: dict[str, str] = {
    "api.keys": "write the list into a separate file and name the file: api: {keys_file: keys.yaml}",
    "batches.engines": "leave it out: the replicas compute the items of batches, after all other requests; for a large "
    "job with separate engines, use `python -m deployments.bulk`",
    "batches.files": "leave it out: files are stored in batches.path; mount the storage there, and copy the objects "
    "that the URL has below the name in PATH/files-name into PATH/files",
    "cascades": "a cascade is a step of a pipeline: write pipelines: [{name: ..., steps: [{kind: cascade, small: ..., "
    "large: ..., min_mean_logprob: ...}]}]",
    "models[].engine.cache.prefix_caching": "leave it out: prompts with the same prefix always share KV memory; with "
    "API keys, only the prompts of one key do",
    "models[].engine.scheduler.policy.preemption": "leave it out: under `priority`, a waiting request may take "
    "the slot of a running request of a lower class",
    "models[].engine.scheduler.strategy.selective": "leave it out; the strategy bucketed with bounds: [64, 1024] "
    "batches short prompts apart from long prompts",
    "models[].engine.speculation.max_drafts": "leave it out: up to 8 tokens are drafted, fewer if more are not faster",
    "models[].engine.model.backend=attention": "leave it out: auto takes the fastest backend for the model",
    "models[].replicas.autoscaling.target_tokens": "leave it out, or write target_s, seconds of work for each replica: "
    "divide these tokens by the tokens_per_s of a replica in GET /admin/fleet",
}


def refuse_removed(given: object, *, within: str = "") -> None:
    """Raise ValueError with a line for each removed setting.

    `within`: the path of `given` in the `args`, such as `models[].engine`.
    """
    mistakes = [line for path, instead in _removed_within(within) for line in _uses(given, path, instead)]
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _removed_within(within: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table below a path, without that path at the start of their own paths."""
    scheduler = "models[].engine.scheduler."
    for path, instead in REMOVED.items():
        in_a_group = path.replace(scheduler, "models[].replicas.groups[].scheduler.")
        for each in dict.fromkeys((path, in_a_group)):  # a group of replicas may override the scheduler's settings
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
    """Yield each place of the path `parts`, with its value. The path limits the depth: a config may contain itself."""
    if not parts:
        yield place, given
    elif parts[0] == "[]" and isinstance(given, list | tuple):
        for index, each in enumerate(given):
            yield from _found(each, parts[1:], f"{place}[{index}]")
    elif isinstance(given, Mapping) and parts[0] in given:
        yield from _found(given[parts[0]], parts[1:], f"{place}.{parts[0]}")
