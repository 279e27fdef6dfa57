"""The backends of a GPU, best first. A replica takes the first one that works, see docs/design/gpu.md.

A kernel that does not compile, a driver that refuses a launch, a step with wrong numbers: each of these costs a replica
a backend, and the next one is tried. Plain torch is the last.

After some CUDA errors a process can do nothing more on its device, and a crash or a hang ends it. A file remembers the
backend that ran, and the next replica takes another backend.
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
from app.engine.stats import TakenBackend
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
    has_decoder: bool  # our own, if that computes the model: weights in FP8 need it
    has_triton: bool  # our kernels for attention: FP8 KV memory, `batch_invariant` and copies of blocks need them


# `model.backend` names the first backend to try; `auto` stands for the best.
BACKENDS: Mapping[str, Backend] = {
    GRAPHS: Backend(
        computes="our decoder, or else transformers' code, with our kernels, replayed from CUDA graphs",
        needs="Triton, a C compiler, Python's headers; memory for graphs; no recurrent layers",
        has_decoder=True,
        has_triton=True,
    ),
    EAGER: Backend(
        computes="the same, launched kernel by kernel",
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
LEFT_OUT_S = 3600.0  # after a loss; the hardware may have failed, and not the code
MOST_LOSSES = 3  # then the backend is left out until a version changes
_ONE_EVENT_S = 60.0  # several losses in this time count as one: a fault may end all processes of a card
_MOST_OF_A_MESSAGE = 200  # characters
_AT_LOAD, _IN_A_STEP = "at the load, ", "in a step, "  # begin the reason of a loss


class BackendFailed(Exception):
    """A backend does not work here. The message says why."""


def cause_of(error: Exception) -> str:
    """An error of the load in one line: its kind, and the first and the last line of its message.

    Compilers begin with the place and name the fault in the last line. No client has sent anything yet, so the message
    holds no client's text.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    ends = dict.fromkeys(line[:_MOST_OF_A_MESSAGE] for line in (lines[0], lines[-1]))
    return f"{type(error).__name__}: {' … '.join(ends)}"


def is_lost(device: torch.device) -> bool:
    """Whether this process can compute nothing more on its device."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


# By setup and backend: the times of the last losses (`time.time`), and the reason of the last loss.
_Setups = dict[str, dict[str, tuple[Annotated[list[float], Len(min_length=1)], str]]]
_SETUPS: TypeAdapter[_Setups] = TypeAdapter(_Setups)
# Of a process: setup, backends, and the beginning of a reason.
_WORK: TypeAdapter[tuple[str, list[str], str]] = TypeAdapter(tuple[str, list[str], str])


@dataclass(frozen=True, slots=True)
class LostDevices:
    """The file of the backends that ran when a device was lost."""

    path: Path
    setup: str  # model, card, driver and versions; each setup has its own entries
    clock: Callable[[], float] = time.time

    def note(self, backends: Iterable[str], reason: str, at: float | None = None) -> None:
        """Note that these backends ended a process. at: when; None: now."""
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
            logger.warning("the next replica may take the same backend again: %s cannot be written: %s",
                           self.path, error)  # fmt: skip

    def note_crashes(self) -> None:
        """Note the backends of processes that crashed or hung, whatever their setup."""
        for work, reason, at in crashes(self.path.parent):
            try:
                setup, backends, when = _WORK.validate_json(work)
            except ValidationError:
                continue
            replace(self, setup=setup).note(backends, f"{when}{reason}", at)

    def watch(self, backends: Iterable[str], when: str) -> None:
        """Have the next process note these backends if this one crashes or hangs. when: the beginning of the reason."""
        open_note(self.path.parent, json.dumps((self.setup, [*backends], when)))

    def left_out(self, named: str = "") -> dict[str, str]:
        """The backends to leave out now, each with the reason.

        named: by the settings. It is tried after a loss in a step; if it failed at the load, it would fail again.
        """
        found = {}
        for backend, (times, reason) in self._read().get(self.setup, {}).items():
            is_at_load = reason.startswith(_AT_LOAD)
            number, ago_s = len(times), self.clock() - times[-1]
            if backend == named and not is_at_load:
                continue
            now = f"remove {self.path} to try it now" if is_at_load else f"model.backend: {backend} tries it now"
            if number >= MOST_LOSSES:
                found[backend] = (
                    f"it ended {number} replicas, the last one {reason}. A replica tries it with another version of "
                    f"the driver or of the packages; {now}"
                )
            elif ago_s < LEFT_OUT_S:
                found[backend] = (
                    f"it ended a replica {ago_s / 60:.0f} minutes ago, {reason}. A replica that starts in "
                    f"{(LEFT_OUT_S - ago_s) / 60:.0f} minutes tries it again; {now}"
                )
        return found

    def _read(self) -> _Setups:
        """The content of the file; nothing if it cannot be read."""
        try:
            return _SETUPS.validate_json(self.path.read_bytes())
        except (OSError, ValidationError):
            return {}


@dataclass(slots=True)
class Ladder:
    """The backends of one replica, the best first, and the reasons against some of them."""

    config: EngineConfig
    device: torch.device
    lost: LostDevices
    is_shared: bool = False  # by ranks, which need the same backend: a failure ends them all, and the next start
    has_own_decoder: bool = True  # until the model is loaded, it may have one
    has_weights: bool = False  # the model is loaded
    failed: dict[str, str] = field(default_factory=dict)  # the reason, by backend or part of one
    skipped: dict[str, str] = field(default_factory=dict)  # the reason, by backend; from settings and the kind of model
    _current: str = ""  # the backend that computes

    @classmethod
    def of(
        cls, config: EngineConfig, device: torch.device, *, driver: str, why_no_triton: str | None, is_shared: bool
    ) -> Ladder:
        """The backends of a replica on this device. why_no_triton: from `device.why_no_triton`."""
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        packages = ", ".join(f"{name} {number}" for name, number in (versions() | {"commit": commit()}).items())
        setup = f"{config.model.path}; {card}; driver {driver}; {packages}"
        ladder = cls(config, device, LostDevices(cache_folder() / FILE_NAME, setup), is_shared)
        ladder.lost.note_crashes()
        first = config.model.backend
        names = ladder.order
        if why_no_triton is not None:
            ladder.failed |= dict.fromkeys(BACKENDS.keys() - WITHOUT_TRITON, f"Triton {why_no_triton}")
        ladder.skipped |= {name: f"model.backend is {first}" for name in BACKENDS if name not in names}
        if config.model.batch_invariant:
            reason = "model.batch_invariant is set, and its products depend on the size of a step"
            ladder.skipped |= dict.fromkeys(WITHOUT_TRITON, reason)
        lost = {name: reason for name, reason in ladder.lost.left_out(first).items() if name != TORCH}
        accepted = [
            name for name in names[: names.index(config.model.require or TORCH) + 1] if name not in ladder.skipped
        ]
        if not set(accepted) <= lost.keys():  # else all accepted backends would be left out
            ladder.failed = lost | ladder.failed
        return ladder

    @property
    def order(self) -> list[str]:
        """The backends that the settings allow. `library` is for those who want it before our kernels."""
        names, first = list(BACKENDS), self.config.model.backend
        if first == LIBRARY:
            return [LIBRARY, TRITON, TORCH]
        return names if first == "auto" else names[names.index(first) :]

    def backends(self) -> Iterator[str]:
        """The backends to try, one after the other.

        Raises:
            InvalidSetup: none of those that `model.require` accepts works.
            UnsupportedModel: none works.
        """
        for backend in self.order:
            if backend not in self.failed | self.skipped:
                yield backend
            if backend == self.config.model.require:
                raise self._too_slow()
        raise UnsupportedModel(f"{self.config.model.path} runs with no backend here: {self._reasons()}")

    @contextmanager
    def trying(self, backend: str) -> Iterator[None]:
        """Around the load with one backend. Notes and swallows an error if another backend may load without it.

        Raises:
            InvalidSetup: the settings or the model are wrong for any backend.
            Failure: this process can try no other, as the device is lost or another rank waits.
        """
        if self.failed:  # the error of the last backend is gone only now, and with it the memory that it held
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.lost.watch(self._alike(backend), _AT_LOAD)
        is_loaded, self.has_weights = False, False
        try:
            yield
            is_loaded = True
        except TooLittleMemory as error:
            if self.is_shared or backend not in (GRAPHS, LIBRARY):  # the backends below need as much memory
                raise
            self.fail([backend], error.message)
        except BackendFailed as error:
            self.fail(self._alike(backend), str(error))
        except (CarouselError, MemoryError, ExchangeFailed):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not self.has_weights:  # files of the model, and not of a compiler
                raise
            reason = cause_of(error)
            if is_lost(self.device):
                self._end(self._alike(backend), f"the device is lost to this process: {reason}")
            self.fail(self._alike(backend), reason)
        finally:
            if not is_loaded:
                close_note()

    def _alike(self, backend: str) -> list[str]:
        """All backends that load the same code: graphs are captured later, after the load."""
        if backend not in (GRAPHS, EAGER):
            return [backend]
        return [GRAPHS, EAGER, *([] if self.has_own_decoder else [TRITON])]

    def note(self, part: str, reason: str | None) -> None:
        """Note the fault of a decoder or a sampler; None: it works."""
        if reason is not None:
            self.failed[part] = reason

    def fail(self, backends: Iterable[str], reason: str) -> None:
        """Note that these do not work. Raises Failure on ranks: the others wait for this one."""
        if self.is_shared:
            self._end(backends, reason)
        for backend in backends:
            if backend not in self.skipped:
                self.failed.setdefault(backend, reason)
                logger.warning("%s: backend %s does not work: %s", self.config.model.path, backend, reason)

    def _end(self, backends: Iterable[str], reason: str) -> NoReturn:
        """Have the next start leave these out. This process can try no other one."""
        backends = [*backends]
        self.lost.note(backends, f"{_AT_LOAD}{reason}")
        raise Failure(
            f"{self.config.model.path}: backend {backends[0]} does not work: {reason}. The next start tries another one"
        )

    def agree(self, minimum: Callable[[int], int]) -> None:
        """Leave out every backend that a rank leaves out. All ranks call it.

        minimum: returns the least of their numbers.
        """
        for name in self.order:
            if not minimum(int(name not in self.failed | self.skipped)):
                self.failed.setdefault(name, "another rank leaves it out")

    def with_graphs(self) -> TakenBackend:
        """The report of a replica with captured steps."""
        self.failed.pop(GRAPHS, None)
        return self.taken(GRAPHS)

    def without_graphs(self, reason: str) -> TakenBackend:
        """The report of a replica without captured steps. Raises InvalidSetup as `backends` does."""
        self.failed[GRAPHS] = reason
        if self.config.model.require == GRAPHS:
            raise self._too_slow()
        return self.taken(EAGER)

    def taken(self, backend: str) -> TakenBackend:
        """The report of a replica with this backend, which computes from now on."""
        self._current = backend
        self.lost.watch(self._alike_in_steps(), _IN_A_STEP)
        return TakenBackend(backend, dict(self.failed))

    def note_loss(self, reason: str) -> None:
        """Note that the device was lost in a step of the backend that computes."""
        self.lost.note(self._alike_in_steps(), f"{_IN_A_STEP}{reason}")

    def _alike_in_steps(self) -> list[str]:
        """The backend that runs, and those above it that would run the same code if a capture failed."""
        return [GRAPHS] if self._current == GRAPHS else self._alike(self._current)

    def _too_slow(self) -> InvalidSetup:
        model = self.config.model
        return InvalidSetup(
            f"model.require is {model.require}, and {model.path} does not run so here: {self._reasons()}. Repair that, "
            f"or leave model.require out to serve more slowly"
        )

    def _reasons(self) -> str:
        reasons = self.skipped | self.failed
        return "; ".join(f"{name}: {reasons[name]}" for name in dict.fromkeys([*BACKENDS, *reasons]) if name in reasons)


def config_for(config: EngineConfig, backend: str) -> EngineConfig:
    """The settings for the load of a backend. FP8 needs our decoder for weights, and our kernels for KV memory."""
    model = config.model
    if backend in WITHOUT_DECODER and model.quantization == "fp8":
        logger.warning("model.quantization is fp8, which %s does not compute: weights are in bfloat16", backend)
        config = config.with_setting("model.quantization", "none")
    if backend in WITHOUT_TRITON and config.cache.dtype == "fp8":
        logger.warning("cache.dtype is fp8, which %s does not compute: KV memory is in the model's type", backend)
        config = config.with_setting("cache.dtype", "auto")
    return config.with_setting("model.backend", backend)
