"""The backends for a GPU, best first. A replica uses the first one that works. See docs/design/gpu.md.

If a kernel does not compile, the driver rejects a launch, or a step computes wrong numbers, the replica tries the next
backend. The last one is plain torch.

After some CUDA errors a process can no longer use its device, and a crash or a hang ends the process. A file records
which backend was running, so that the next replica starts with another one.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NoReturn

import torch
from annotated_types import Len
from pydantic import TypeAdapter, ValidationError

from app.config import EngineConfig
from app.disk import cache_folder, locked, write_atomically
from app.engine.stats import ChosenBackend
from app.errors import CarouselError, ExchangeFailed, Failure, InvalidSetup, TooLittleMemory, UnsupportedModel
from app.model.crash_notes import close_note, crashes, open_note
from app.versions import commit, versions

logger = logging.getLogger(__name__)

GRAPHS, EAGER, TRITON, LIBRARY, TORCH = "graphs", "eager", "triton", "library", "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One row of the table in docs/design/gpu.md, which `scripts.backends_table` writes."""

    computes: str
    needs: str
    has_decoder: bool  # whether our decoder runs the models that it supports; required for weights in FP8
    has_triton: bool  # whether our attention kernels run; required for FP8 KV memory, `batch_invariant`, block copies


# `model.backend` names the only backend to try. `auto` tries all of them, best first.
BACKENDS: Mapping[str, Backend] = {
    GRAPHS: Backend(
        computes="our decoder, or else transformers' code, with our kernels, replayed from CUDA graphs",
        needs="Triton, a C compiler, Python's headers; memory for graphs; no recurrent layers",
        has_decoder=True,
        has_triton=True,
    ),
    EAGER: Backend(
        computes="the same as `graphs`, launched kernel by kernel",
        needs="Triton, a C compiler, Python's headers",
        has_decoder=True,
        has_triton=True,
    ),
    TRITON: Backend(
        computes="transformers' code with our kernels for attention and recurrent layers",
        needs="Triton, a C compiler, Python's headers",
        has_decoder=False,
        has_triton=True,
    ),
    LIBRARY: Backend(
        computes="transformers' code with torch's FlashAttention over gathered keys and values, recurrent layers in "
        "plain torch",
        needs="compute capability 8.0; a model in 16 bits, keys and values of one size of at most 256, no softcap, "
        "sinks or latents",
        has_decoder=False,
        has_triton=False,
    ),
    TORCH: Backend(
        computes="transformers' code with plain torch for attention, recurrent layers and draws",
        needs="torch with CUDA",
        has_decoder=False,
        has_triton=False,
    ),
}
WITHOUT_DECODER = frozenset(name for name, each in BACKENDS.items() if not each.has_decoder)
WITHOUT_TRITON = frozenset(name for name, each in BACKENDS.items() if not each.has_triton)
FILE_NAME = "lost_devices.json"
EXCLUDED_S = 3600.0  # a backend is excluded this long after it lost a device; not forever: it may be the hardware
MOST_LOSSES = 3  # after this many losses, a backend is excluded until the version of the driver or a package changes
_ONE_EVENT_S = 60.0  # losses within this time count as one, because a fault may end all processes on a card
_MOST_OF_A_MESSAGE = 200  # characters
_AT_LOAD, _IN_A_STEP = "while loading, ", "in a step, "  # prefixes of the reason for a loss


class BackendFailed(Exception):
    """Raised while loading if a backend does not work on this machine. The message says why."""


def cause_of(error: Exception) -> str:
    """Return one line for an error: its class, and the first and the last line of its message.

    Compilers report the location in the first line and the fault in the last. While a model is loading, no client has
    sent anything, so the line cannot contain a client's text.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    ends = dict.fromkeys(line[:_MOST_OF_A_MESSAGE] for line in (lines[0], lines[-1]))
    return f"{type(error).__name__}: {' … '.join(ends)}"


def is_lost(device: torch.device) -> bool:
    """Return whether this process can no longer use its device, after waiting for the device's work."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


# By setup and backend: the times of the last losses (`time.time`), and the reason for the last one.
_Setups = dict[str, dict[str, tuple[Annotated[list[float], Len(min_length=1)], str]]]
_SETUPS: TypeAdapter[_Setups] = TypeAdapter(_Setups)
# The note that a process leaves for a crash: its setup, the backends to record, and the prefix of the reason.
_WORK: TypeAdapter[tuple[str, list[str], str]] = TypeAdapter(tuple[str, list[str], str])


@dataclass(frozen=True, slots=True)
class LostDevices:
    """The file that records which backends were running when a device was lost."""

    path: Path
    setup: str  # model, card, driver and versions; losses of other setups do not count
    clock: Callable[[], float] = time.time

    def note(self, backends: Iterable[str], reason: str, at: float | None = None) -> None:
        """Record that these backends ended a process at the time `at`, by default now. Only logs a failed write."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_suffix(".lock")):
                setups, now = self._read(), self.clock() if at is None else at
                for backend in backends:
                    before, _ = setups.setdefault(self.setup, {}).get(backend, ([], ""))
                    times = [time for time in before if not 0 <= now - time < _ONE_EVENT_S]
                    setups[self.setup][backend] = ([*times, now][-MOST_LOSSES:], reason[:500])
                write_atomically(self.path, json.dumps(setups, indent=1).encode())
        except OSError as error:
            logger.warning("the next replica may try the same backend again, because %s cannot be written: %s",
                           self.path, error)  # fmt: skip

    def note_crashes(self) -> None:
        """Record the losses of earlier processes that crashed or hung, each under that process's setup."""
        for work, reason, at in crashes(self.path.parent):
            try:
                setup, backends, when = _WORK.validate_json(work)
            except ValidationError:
                continue
            replace(self, setup=setup).note(backends, f"{when}{reason}", at)

    def watch(self, backends: Iterable[str], when: str) -> None:
        """Leave a note: if this process crashes, the next one records these backends. when: the reason's prefix."""
        open_note(self.path.parent, json.dumps((self.setup, [*backends], when)))

    def left_out(self) -> dict[str, str]:
        """Return the backends to exclude now, each with the reason."""
        found = {}
        for backend, (times, reason) in self._read().get(self.setup, {}).items():
            number, ago_s = len(times), self.clock() - times[-1]
            now = f"set model.backend: {backend} to try it now"
            if number >= MOST_LOSSES:
                found[backend] = (
                    f"it ended {number} replicas, the last one {reason}. It will be tried again with another version "
                    f"of the driver or the packages; {now}"
                )
            elif ago_s < EXCLUDED_S:
                found[backend] = (
                    f"it ended a replica {ago_s / 60:.0f} minutes ago, {reason}. It will be tried again "
                    f"{(EXCLUDED_S - ago_s) / 60:.0f} minutes from now; {now}"
                )
        return found

    def _read(self) -> _Setups:
        """Return the content of the file, or an empty dict if the file is missing or unreadable."""
        try:
            return _SETUPS.validate_json(self.path.read_bytes())
        except (OSError, ValidationError):
            return {}


@dataclass(slots=True)
class Ladder:
    """The backends that a replica may use, best first, and the reasons why others are excluded."""

    config: EngineConfig
    device: torch.device
    lost: LostDevices
    is_shared: bool = False  # whether ranks share one backend; its failure ends all ranks and excludes it at restart
    has_own_decoder: bool = True  # whether our decoder may run the model; assumed until the model is loaded
    has_weights: bool = False  # whether the model is loaded
    failed: dict[str, str] = field(default_factory=dict)  # why a backend, or a part of one, does not work
    skipped: dict[str, str] = field(default_factory=dict)  # why the settings or the model rule out a backend
    _current: str = ""  # the backend that runs steps

    @classmethod
    def of(
        cls, config: EngineConfig, device: torch.device, *, driver: str, why_no_triton: str | None, is_shared: bool
    ) -> Ladder:
        """Record earlier crashes, and return the ladder. why_no_triton: the result of `device.why_no_triton`."""
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        packages = ", ".join(f"{name} {number}" for name, number in (versions() | {"commit": commit()}).items())
        setup = f"{config.model.path}; {card}; driver {driver}; {packages}"
        ladder = cls(config, device, LostDevices(cache_folder() / FILE_NAME, setup), is_shared)
        ladder.lost.note_crashes()
        if why_no_triton is not None:
            ladder.failed |= dict.fromkeys(BACKENDS.keys() - WITHOUT_TRITON, f"Triton {why_no_triton}")
        named = config.model.backend
        ladder.skipped |= {name: f"model.backend is {named}" for name in BACKENDS if name not in ladder.order}
        if config.model.batch_invariant:
            reason = "model.batch_invariant is set, but this backend's products depend on the size of a step"
            ladder.skipped |= dict.fromkeys(WITHOUT_TRITON, reason)
        accepted = set(ladder.order) - ladder.skipped.keys()
        lost = {name: why for name, why in ladder.lost.left_out().items() if name in accepted and name != TORCH}
        if lost.keys() != accepted:  # ignore losses if they would exclude all acceptable backends
            ladder.failed = lost | ladder.failed
        return ladder

    @property
    def order(self) -> list[str]:
        """The backends that the settings allow, in the order to try them."""
        named = self.config.model.backend
        return list(BACKENDS) if named == "auto" else [named]

    def backends(self) -> Iterator[str]:
        """Yield the backends to try, best first. Stop iterating once a backend works.

        Raises:
            InvalidSetup: the backend that `model.backend` names has failed.
            UnsupportedModel: every backend has failed.
        """
        for backend in self.order:
            if backend not in self.failed | self.skipped:
                yield backend
        self._check_named()
        raise UnsupportedModel(f"no backend can run {self.config.model.path} here: {self._reasons()}")

    @contextmanager
    def trying(self, backend: str) -> Iterator[None]:
        """Wrap the loading of the model with one backend. Records and suppresses errors that another backend may avoid.

        Raises:
            InvalidSetup: the settings or the model are wrong for any backend.
            Failure: this process cannot try another backend, because the device is lost or other ranks are waiting.
        """
        if self.failed:  # the previous backend's error held references to memory on the device
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.lost.watch(self._same_code_at_load(backend), _AT_LOAD)
        is_loaded, self.has_weights = False, False
        try:
            yield
            is_loaded = True
        except TooLittleMemory as error:
            if self.is_shared or backend not in (GRAPHS, LIBRARY):  # the next backend would not need less memory
                raise
            self.fail([backend], error.message)
        except BackendFailed as error:
            self.fail(self._same_code_at_load(backend), str(error))
        except (CarouselError, MemoryError, ExchangeFailed):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not self.has_weights:  # the model's files are at fault, not a compiler
                raise
            reason = cause_of(error)
            if is_lost(self.device):
                self._end(self._same_code_at_load(backend), f"the device is lost to this process: {reason}")
            self.fail(self._same_code_at_load(backend), reason)
        finally:
            if not is_loaded:
                close_note()

    def _same_code_at_load(self, backend: str) -> list[str]:
        """Return the backends that run the same code during the load, before graphs are captured."""
        if backend not in (GRAPHS, EAGER):
            return [backend]
        return [GRAPHS, EAGER, *([] if self.has_own_decoder else [TRITON])]

    def note(self, part: str, reason: str | None) -> None:
        """Record why a part of a backend, such as a decoder or a sampler, does not work. None records nothing."""
        if reason is not None:
            self.failed[part] = reason

    def fail(self, backends: Iterable[str], reason: str) -> None:
        """Record that these backends do not work. Raises Failure on ranks, because the other ranks wait."""
        if self.is_shared:
            self._end(backends, reason)
        for backend in backends:
            if backend not in self.skipped:
                self.failed.setdefault(backend, reason)
                logger.warning("%s: backend %s does not work: %s", self.config.model.path, backend, reason)

    def _end(self, backends: Iterable[str], reason: str) -> NoReturn:
        """Record these backends as lost, so that they are excluded after a restart, and raise Failure."""
        backends = [*backends]
        self.lost.note(backends, f"{_AT_LOAD}{reason}")
        raise Failure(
            f"{self.config.model.path}: backend {backends[0]} does not work: {reason}. A restart tries another backend"
        )

    def agree(self, minimum: Callable[[int], int]) -> None:
        """Exclude every backend that any rank excludes, because ranks share one backend. Must be called on all ranks.

        minimum: returns the smallest number that any rank passes.
        """
        for name in self.order:
            if not minimum(int(name not in self.failed | self.skipped)):
                self.failed.setdefault(name, "another rank excludes it")

    def with_graphs(self) -> ChosenBackend:
        """Record that steps run from graphs. Returns the chosen backend."""
        self.failed.pop(GRAPHS, None)
        return self.taken(GRAPHS)

    def without_graphs(self, reason: str) -> ChosenBackend:
        """Record why steps run without graphs, and return the backend. Raises InvalidSetup if graphs are required."""
        self.failed[GRAPHS] = reason
        if self.config.model.backend == GRAPHS:
            self._check_named()
        return self.taken(EAGER)

    def taken(self, backend: str) -> ChosenBackend:
        """Return this backend as the chosen one, and leave a note in case its steps crash."""
        self._current = backend
        self.lost.watch(self._same_code_in_steps(), _IN_A_STEP)
        return ChosenBackend(backend, dict(self.failed))

    def note_loss(self, reason: str) -> None:
        """Record in the file that the device was lost in a step of the current backend."""
        self.lost.note(self._same_code_in_steps(), f"{_IN_A_STEP}{reason}")

    def _same_code_in_steps(self) -> list[str]:
        """Return the backends that run the same code in steps. Without captured graphs, `graphs` runs like `eager`."""
        return [GRAPHS] if self._current == GRAPHS else self._same_code_at_load(self._current)

    def _check_named(self) -> None:
        """Raise InvalidSetup if the settings name the backend that failed."""
        model = self.config.model
        if model.backend != "auto":
            raise InvalidSetup(
                f"model.backend is {model.backend}, but it cannot run {model.path} here: {self._reasons()}. "
                f"Fix that, or remove model.backend to serve with another backend"
            )

    def _reasons(self) -> str:
        found = (self.skipped | self.failed).items()
        reasons = {name: why for name, why in found if name in self.order or name not in BACKENDS}
        return "; ".join(f"{name}: {reasons[name]}" for name in dict.fromkeys([*BACKENDS, *reasons]) if name in reasons)


def config_for(config: EngineConfig, backend: str) -> EngineConfig:
    """Return the settings for loading a backend. FP8 settings that it does not support are replaced, with a warning."""
    model = config.model
    if backend in WITHOUT_DECODER and model.quantization == "fp8":
        logger.warning("model.quantization is fp8, which %s does not support; the weights are in bfloat16", backend)
        config = config.with_setting("model.quantization", "none")
    if backend in WITHOUT_TRITON and config.cache.dtype == "fp8":
        logger.warning("cache.dtype is fp8, which %s does not support; KV memory is in the model's type", backend)
        config = config.with_setting("cache.dtype", "auto")
    return config.with_setting("model.backend", backend)
