"""The backends of a GPU, best first. A replica takes the first one that works.

A kernel that does not compile, a driver that refuses a launch, a step with wrong numbers: each of these costs a replica
one backend, and the next one is tried. Plain torch is the last.

A CUDA error may end what a process can do on its device. A file remembers the backend that a device was lost on, so
that the replica which starts next takes another one.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.config import EngineConfig
from app.disk import cache_folder, write_atomically
from app.engine.stats import TakenBackend
from app.errors import CarouselError, Failure, InvalidSetup, TooLittleMemory, UnsupportedModel, described
from app.versions import versions

logger = logging.getLogger(__name__)

GRAPHS, EAGER, TRITON, TORCH = "graphs", "eager", "triton", "torch"
# `model.backend` names the first one that is tried; `auto` begins with the best.
BACKENDS: Mapping[str, str] = {
    GRAPHS: "our decoder, or else transformers' code, with our kernels, replayed from CUDA graphs",
    EAGER: "the same without CUDA graphs",
    TRITON: "transformers' code with our kernels for attention",
    TORCH: "transformers' code with plain torch for attention and sampling",
}
FILE_NAME = "lost_devices.json"
LEFT_OUT_S = 3600.0  # after a loss; a device may be lost for other reasons than the code that runs
MOST_LOSSES = 3  # of a device with one backend, before only another version lets it be tried
# A replica that loses its device while it loads has failed to start, and Ray gives up after a few of these.
_MOST_LOST_BACKENDS = 2


class BackendFailed(Exception):
    """A backend does not work here. The message says why."""


@dataclass(frozen=True, slots=True)
class LostDevices:
    """The file that remembers with which backends a device was lost."""

    path: Path
    setup: str  # card, driver, versions and model; other setups have entries of their own
    clock: Callable[[], float] = time.time

    def note(self, backend: str, reason: str) -> None:
        """Remember that a device was lost with this backend."""
        setups = self._read()
        losses = setups.setdefault(self.setup, {}).setdefault(backend, {"times": []})
        losses |= {"times": [*losses["times"], self.clock()][-MOST_LOSSES:], "reason": reason[:500]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(setups, indent=1).encode())
        except OSError as error:
            logger.warning("the next replica may take backend %s again: %s cannot be written: %s",
                           backend, self.path, error)  # fmt: skip

    def left_out(self) -> dict[str, str]:
        """The backends that are not tried now, each with the reason."""
        found = {}
        for backend, losses in self._read().get(self.setup, {}).items():
            number, ago_s = len(losses["times"]), self.clock() - losses["times"][-1]
            if number >= MOST_LOSSES:
                found[backend] = (
                    f"the device was lost with it {number} times, the last time by: {losses['reason']}. Another "
                    f"version of the driver, torch, Triton or Carousel is tried; remove {self.path} to try this one"
                )
            elif ago_s < LEFT_OUT_S:
                found[backend] = (
                    f"the device was lost with it {ago_s / 60:.0f} minutes ago by: {losses['reason']}. It is tried "
                    f"again in {(LEFT_OUT_S - ago_s) / 60:.0f} minutes; remove {self.path} to try it before"
                )
        return found

    def _read(self) -> dict[str, Any]:
        """The content of the file; nothing if it cannot be read."""
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class Ladder:
    """The backends of one replica in the order in which they are tried, and why some of them are left."""

    config: EngineConfig
    device: torch.device
    lost: LostDevices
    is_shared: bool = False  # by ranks, which take the first backend or none
    left: dict[str, str] = field(default_factory=dict)  # what has failed, and why
    skipped: dict[str, str] = field(default_factory=dict)  # what the settings or the kind of model leave out, and why

    @classmethod
    def of(
        cls, config: EngineConfig, device: torch.device, *, driver: str, why_no_triton: str | None, is_shared: bool
    ) -> Ladder:
        """The backends of a replica on this device. why_no_triton: what Triton lacks, if anything."""
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        packages = ", ".join(f"{name} {number}" for name, number in versions().items())
        setup = f"{config.model.path}; {card}; driver {driver}; {packages}"
        ladder = cls(config, device, LostDevices(cache_folder() / FILE_NAME, setup), is_shared)
        names, first = list(BACKENDS), config.model.backend
        above_torch = names[:-1]
        lost = {name: reason for name, reason in ladder.lost.left_out().items() if name in above_torch}
        if len(lost) >= _MOST_LOST_BACKENDS:
            lost = dict.fromkeys(above_torch, f"the device was lost with {' and '.join(lost)}") | lost
        ladder.left |= lost
        if why_no_triton is not None:
            ladder.left |= dict.fromkeys(above_torch, f"Triton {why_no_triton}")
        if first != "auto":
            ladder.skipped |= dict.fromkeys(names[: names.index(first)], f"model.backend is {first}")
        return ladder

    def backends(self) -> Iterator[str]:
        """The backends to try, one after the other.

        Raises:
            InvalidSetup: none of those that `model.require` accepts works.
            UnsupportedModel: none works.
        """
        path = self.config.model.path
        for backend in BACKENDS:
            if backend not in self.left | self.skipped:
                yield backend
            if backend == self.config.model.require:
                raise self._too_slow()
        raise UnsupportedModel(f"{path} runs with no backend here: {self._reasons()}")

    @contextmanager
    def trying(self, backend: str) -> Iterator[None]:
        """Around the load with one backend. Notes an error that the next backend may not have, and swallows it.

        Raises:
            InvalidSetup: the settings or the model are wrong for any backend.
            Failure: the device is lost, so this process can try no other.
        """
        if self.left:  # only now nothing holds the error of the last one any more, and with it its memory
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        try:
            yield
            return
        except BackendFailed as error:
            if self.is_shared:
                raise UnsupportedModel(f"{self.config.model.path} cannot be divided among ranks: {error}") from error
            reason = str(error)
        except TooLittleMemory as error:
            if backend != GRAPHS:  # the other backends need no more memory than the next
                raise
            reason = error.message
        except CarouselError:
            raise
        except Exception as error:
            if self.is_shared:  # the other ranks wait for this one
                raise
            reason = described(error)
        self.leave(backend, reason)

    def note(self, part: str, reason: str | None) -> None:
        """Note what is wrong with a part that all backends can do without; None: nothing."""
        if reason is not None:
            self.left[part] = reason

    def leave(self, backend: str, reason: str) -> None:
        """Note that a backend does not work. Raises Failure as `trying` does."""
        self.left[backend] = reason
        logger.warning("%s is not computed by %s: %s", self.config.model.path, BACKENDS[backend], reason)
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.lost.note(backend, reason)
            raise Failure(
                f"the device is lost to this process, and the next start tries another backend than {backend}: {reason}"
            ) from error

    def without_graphs(self, reason: str) -> TakenBackend:
        """What a replica reports whose steps turn out not to be captured. Raises InvalidSetup as `backends` does."""
        self.left[GRAPHS] = reason
        if self.config.model.require == GRAPHS:
            raise self._too_slow()
        return self.taken(EAGER)

    def taken(self, backend: str) -> TakenBackend:
        """What a replica reports that computes with this backend."""
        return TakenBackend(backend, dict(self.left))

    def _too_slow(self) -> InvalidSetup:
        model = self.config.model
        return InvalidSetup(
            f"model.require is {model.require}, and {model.path} does not run so here: {self._reasons()}. Repair that, "
            f"or leave model.require out to serve more slowly"
        )

    def _reasons(self) -> str:
        return "; ".join(f"{backend}: {reason}" for backend, reason in (self.skipped | self.left).items())


def config_for(config: EngineConfig, backend: str) -> EngineConfig:
    """The settings with which a backend is loaded. FP8 needs our decoder for weights and our kernels for KV memory."""
    model = config.model
    if backend in (TRITON, TORCH) and model.quantization == "fp8":
        logger.warning("model.quantization is fp8, which %s does not compute: weights are in bfloat16", backend)
        config = config.with_setting("model.quantization", "none")
    if backend == TORCH and config.cache.dtype == "fp8":
        logger.warning("cache.dtype is fp8, which %s does not compute: KV memory is in the model's type", backend)
        config = config.with_setting("cache.dtype", "auto")
    return config.with_setting("model.backend", "auto" if backend == GRAPHS else backend)
