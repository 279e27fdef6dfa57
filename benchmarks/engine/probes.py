"""A stopwatch in a running engine, put there from outside: wrapped functions and forward hooks.

All of them are taken out again, and nothing in `app` knows of this. The functions are named here; one that is not found
is reported, and its time counts for the part around it.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

SCHEDULE = "schedule"
INPUTS = "inputs"
LINEAR = "linear layers"
HEAD = "output layer"
ATTENTION = "attention"
FORWARD = "rest of the forward pass"
SAMPLING = "sampling"
RUNNER = "host copy and rest of the runner"
UPDATE = "update"
DELIVERY = "delivery"
PARTS = (SCHEDULE, INPUTS, LINEAR, HEAD, ATTENTION, FORWARD, SAMPLING, RUNNER, UPDATE, DELIVERY)

P = ParamSpec("P")
R = TypeVar("R")

# Module, name of a class or nothing, name of the function, part.
_FUNCTIONS = (
    ("app.engine.engine", "Engine", "step", DELIVERY),
    ("app.engine.scheduler", "Scheduler", "schedule", SCHEDULE),
    ("app.engine.scheduler", "Scheduler", "update", UPDATE),
    ("app.engine.overlapped_engine", "OverlappedEngine", "step", DELIVERY),
    ("app.engine.scheduler", "Scheduler", "advance", UPDATE),
    ("app.engine.scheduler", "Scheduler", "settle", UPDATE),
    ("app.model.runner", "TorchModelRunner", "run", RUNNER),
    ("app.model.runner", None, "build_inputs", INPUTS),
    ("app.model.runner", None, "sample", SAMPLING),
    ("app.model.cuda.graph_runner", "GraphModelRunner", "launch", RUNNER),
    ("app.model.cuda.graph_runner", None, "build_inputs", INPUTS),
    ("app.model.cuda.graph_runner", None, "sample", SAMPLING),
)
# What a forward pass that counts by itself calls its parts.
_OWN_PARTS = {"linear": LINEAR, "head": HEAD, "attention": ATTENTION, "rest": FORWARD}
# There are several attentions, one of which is chosen: these methods of every class in the model room.
_ATTENTION_METHODS = {"attend": ATTENTION, "begin_step": INPUTS}


@dataclass(slots=True)
class _Open:
    started_s: float
    inner_s: float = 0.0


@dataclass(slots=True)
class Stopwatch:
    """One thread's time by part; the time of an inner part is not counted for the outer one.

    `synchronize` waits for the device, so that its work counts where it was asked for.
    """

    synchronize: Callable[[], None] | None = None
    now: Callable[[], float] = time.perf_counter
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[_Open] = field(default_factory=list)

    def enter(self) -> None:
        self._open.append(_Open(self._read()))

    def leave(self, part: str) -> None:
        """End what was entered last, and say what it was."""
        ended = self._open.pop()
        whole_s = self._read() - ended.started_s
        self.seconds[part] += whole_s - ended.inner_s
        if self._open:
            self._open[-1].inner_s += whole_s

    def note(self, part: str, seconds: float) -> None:
        """Count what something inside the open part measured by itself."""
        self.seconds[part] += seconds
        if self._open:
            self._open[-1].inner_s += seconds

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """The same function, counted as `part`."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self.enter()
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(part)

        return run

    def _read(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return self.now()


class RootModule:
    """Finds the module that a model runner calls: the first that runs while this watches."""

    def __init__(self) -> None:
        self.module: torch.nn.Module | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: torch.nn.Module, _: Any) -> None:
        if self.module is None:
            self.module = module


@contextmanager
def probes(stopwatch: Stopwatch, forward: Any, root: torch.nn.Module | None, *, vocab_size: int) -> Iterator[list[str]]:
    """Put the stopwatch in; yields what was not found. forward: the runner's, which may count its own time."""
    missing: list[str] = []
    with ExitStack() as stack:
        for module_name, class_name, name, part in _FUNCTIONS:
            module = importlib.import_module(module_name)
            owner = module if class_name is None else getattr(module, class_name, None)
            if owner is None or name not in vars(owner):
                missing.append(".".join(filter(None, (module_name, class_name, name))))
                continue
            stack.enter_context(_wrapped(stopwatch, owner, name, part))
        for owner, name in _attention_methods():
            stack.enter_context(_wrapped(stopwatch, owner, name, _ATTENTION_METHODS[name]))
        if hasattr(forward, "seconds"):
            stack.enter_context(_clocked(stopwatch, forward))
        elif root is None:
            missing.append("a torch module that the runner calls")
        else:
            stack.enter_context(_hooked(stopwatch, root, vocab_size))
        yield missing


@contextmanager
def _wrapped(stopwatch: Stopwatch, owner: Any, name: str, part: str) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, stopwatch.timed(part, original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _clocked(stopwatch: Stopwatch, forward: Any) -> Iterator[None]:
    """Time of a forward pass that counts by itself, taken over part by part."""
    predict = forward.predict

    def timed(*given: Any) -> Any:
        before = forward.seconds()
        stopwatch.enter()
        result = predict(*given)
        for name, after in forward.seconds().items():
            stopwatch.note(_OWN_PARTS[name], after - before[name])
        stopwatch.leave(FORWARD)
        return result

    forward.predict = timed
    try:
        yield
    finally:
        del forward.predict


@contextmanager
def _hooked(stopwatch: Stopwatch, root: torch.nn.Module, vocab_size: int) -> Iterator[None]:
    def enter(module: torch.nn.Module, _: Any) -> None:
        stopwatch.enter()

    def leave(module: torch.nn.Module, _: Any, output: Any) -> None:
        if module is root:
            stopwatch.leave(FORWARD)
        else:
            is_head = isinstance(output, torch.Tensor) and output.shape[-1] == vocab_size
            stopwatch.leave(HEAD if is_head else LINEAR)

    watched = [root, *(module for module in root.modules() if is_linear(module) and module is not root)]
    handles = [module.register_forward_pre_hook(enter) for module in watched]
    handles += [module.register_forward_hook(leave) for module in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_linear(module: torch.nn.Module) -> bool:
    """A matrix product with weights: what says its features in and out, and transformers' Conv1D, which does not.

    By what it says and not by its type: an engine may replace layers by faster ones of its own.
    """
    return (hasattr(module, "in_features") and hasattr(module, "out_features")) or type(module).__name__ == "Conv1D"


def _attention_methods() -> list[tuple[type, str]]:
    classes = {
        found
        for module_name, module in sorted(sys.modules.items())
        if module_name.startswith("app.model.")
        for found in vars(module).values()
        if isinstance(found, type) and found.__module__ == module_name and not getattr(found, "_is_protocol", False)
    }
    return [(owner, name) for owner in classes for name in _ATTENTION_METHODS if name in vars(owner)]
