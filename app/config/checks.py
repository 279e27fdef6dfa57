"""Checks across branches of the settings. Each check raises ValueError with the path of the wrong setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.config.base import repeated
from app.config.models import ServedModelConfig
from app.config.pipelines import PipelineConfig, RouteStepConfig, named_by

MAX_RUNS = 64  # maximum model runs for one request to a pipeline


def check_branches(models: Sequence[ServedModelConfig], pipelines: Sequence[PipelineConfig]) -> None:
    """Run all checks."""
    check_names(models, pipelines)
    for index, model in enumerate(models):
        check_devices(f"models[{index}]", model)
    check_pipelines(models, pipelines)


def check_names(models: Sequence[ServedModelConfig], pipelines: Sequence[PipelineConfig]) -> None:
    """Check that each name belongs to one model, adapter or pipeline, and to one Serve deployment."""
    names = [name for model in models for name in model.all_names]
    twice = repeated([*names, *(pipeline.name for pipeline in pipelines)])
    if twice:
        raise ValueError(f"several models, adapters or pipelines are named {', '.join(twice)}; give each its own name")
    by_deployment: dict[str, str] = {}
    for index, model in enumerate(models):
        twin = by_deployment.setdefault(model.deployment_name, model.name)
        if twin != model.name:
            raise ValueError(
                f"models[{index}].name: got {model.name!r}, too similar to {twin!r}, because both would use the Serve "
                f"deployment {model.deployment_name!r}; choose names that differ in more than punctuation"
            )


def check_devices(where: str, model: ServedModelConfig) -> None:
    """Check that each replica has the devices that its engine needs."""
    device, num_gpus, size = model.engine.model.device, model.replicas.num_gpus, model.replicas.tensor_parallel
    field = f"{where}.replicas.num_gpus: got {num_gpus:g}"
    if device == "cuda" and num_gpus == 0:
        raise ValueError(
            f"{field} with engine.model.device 'cuda', but a replica can use only the GPUs that are reserved for it; "
            f"set num_gpus to 1, or device to 'cpu'"
        )
    if device == "cpu" and num_gpus > 0:
        raise ValueError(f"{field} with engine.model.device 'cpu'; set num_gpus to 0, or device to 'auto'")
    if num_gpus > 1:
        raise ValueError(
            f"{field}; it must be at most 1. For {num_gpus:g} GPUs per replica, set num_gpus to 1 and "
            f"replicas.tensor_parallel to {num_gpus:g}"
        )
    if size > 1 and 0 < num_gpus < 1:
        raise ValueError(f"{field} with tensor_parallel {size}; each rank needs a whole GPU: set num_gpus to 1")
    if size > 1 and model.engine.model.simulated is not None:
        raise ValueError(
            f"{where}.replicas.tensor_parallel: got {size}; a simulated model runs in one process, so set it to 1"
        )


def check_pipelines(models: Sequence[ServedModelConfig], pipelines: Sequence[PipelineConfig]) -> None:
    """Check that pipelines name existing models and pipelines, and that no pipeline calls itself."""
    names = [name for model in models for name in model.all_names]
    pipeline_of = {pipeline.name: pipeline for pipeline in pipelines}
    for index, pipeline in enumerate(pipelines):
        for place, step in enumerate(pipeline.steps):
            for field, name, answers in named_by(step):
                known = [*names, *(pipeline_of if answers else ())]
                if name not in known:
                    what = "model or pipeline" if answers else "model"
                    raise ValueError(
                        f"pipelines[{index}].steps[{place}].{field}: there is no {what} {name!r}; use one of "
                        f"{', '.join(known)}"
                    )
    without_circle: set[str] = set()
    for index, name in enumerate(pipeline_of):
        circle = _find_cycle(name, pipeline_of, without_circle)
        if circle:
            raise ValueError(
                f"pipelines[{index}]: the pipeline would call itself: {' → '.join(circle)}; replace one of these names "
                f"with the name of a model"
            )
    num_runs: dict[str, int] = {}
    for index, name in enumerate(pipeline_of):
        if (number := _num_runs(name, pipeline_of, num_runs)) > MAX_RUNS:
            raise ValueError(
                f"pipelines[{index}]: a request for {name} would run {number:,} models, including those of inner "
                f"pipelines; at most {MAX_RUNS} are allowed; name fewer models in the steps"
            )


def _find_cycle(
    name: str, pipelines: Mapping[str, PipelineConfig], without_circle: set[str], before: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the path from `name` into a cycle of pipelines, up to the first repeated name; empty without a cycle.

    `without_circle` caches pipelines that lead to no cycle.
    """
    if name in before:
        return (*before, name)
    if name not in without_circle:
        for inner in named_by(pipelines[name].steps[-1]):
            if inner.name in pipelines and (
                circle := _find_cycle(inner.name, pipelines, without_circle, (*before, name))
            ):
                return circle
        without_circle.add(name)
    return ()


def _num_runs(name: str, pipelines: Mapping[str, PipelineConfig], known: dict[str, int]) -> int:
    """Return the maximum number of model runs for a request to a pipeline, or 1 for a model. `known` caches results."""
    if name not in pipelines:
        return 1
    if name not in known:
        *ranking, last = pipelines[name].steps
        answering = [_num_runs(each.name, pipelines, known) for each in named_by(last) if each.answers]
        if isinstance(last, RouteStepConfig):
            answering = [max(answering), *([] if last.classifier is None else [1])]
        known[name] = len(ranking) + sum(answering)
    return known[name]
