"""A step that a GPU computes while the host does other work, and the detection of a lost GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.engine.batch import DeviceLost, StepBatch, StepResult
from app.errors import described
from app.model.gpu_backends import cause_of
from app.model.logprobs import Logprobs
from app.model.parallel.ranks import Ranks
from app.model.pooling import PooledStates
from app.model.runner import DrawnTokens, NoRanks


class LaunchedStep:
    """A launched step, which may still be running. `result` waits for it."""

    def __init__(
        self,
        draw: Callable[[StepBatch], DrawnOnHost],
        finding_loss: DeviceLossGuard,
        pooled: PooledStates | None = None,
        *,
        ranks: Ranks | NoRanks,
    ) -> None:
        """draw: queues the drawing of tokens after the forward pass. ranks: the other ranks that run the step."""
        self._ranks = ranks
        self._draw = draw
        self._finding_loss = finding_loss
        self._drawn: DrawnOnHost | None = None
        self._pooled = pooled
        self._sums = None if pooled is None else _copy_to_host(pooled.sums)

    def draw(self, batch: StepBatch) -> None:
        with self._finding_loss:
            self._drawn = self._draw(batch)

    def result(self) -> StepResult:
        """Wait for this step, but not for later ones, and return its result. Raises DeviceLost."""
        assert self._drawn is not None, "its tokens were never drawn"
        if self._drawn.copied is not None:
            with self._finding_loss, self._ranks.watched():
                self._drawn.copied.synchronize()
        result = self._drawn.result()
        if self._pooled is not None and self._sums is not None:
            result = result._replace(pooled=self._pooled.result(self._sums))
        return result


class DrawnOnHost:
    """The results of a step, whose copies to the host may still be running. `copied` is the event after the copies."""

    def __init__(self, drawn: DrawnTokens) -> None:
        logprobs = None if drawn.logprobs is None else Logprobs(*map(_copy_to_host, drawn.logprobs))
        self._on_host = DrawnTokens(_copy_to_host(drawn.token_ids), drawn.wanted, logprobs)
        self.copied = None
        if drawn.token_ids.is_cuda:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def result(self) -> StepResult:
        return self._on_host.result()


class DeviceLossGuard:
    """A context manager that turns an error into DeviceLost if the process can no longer use its device.

    After an illegal address, a failed assertion in a kernel or a memory fault, all later calls of the process on its
    device fail. After an out-of-memory error or a rejected launch, the device still works.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.note: Callable[[str], None] = lambda reason: None  # called with the reason for a loss

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, DeviceLost):  # a DeviceLost has already been noted
            self.check(error)

    def check(self, error: Exception) -> None:
        """Raise DeviceLost, and note the reason, if the device no longer works after this error."""
        try:
            self._synchronize()
        except RuntimeError as loss:
            self.note(cause_of(error) if isinstance(error, RuntimeError) else described(error))
            raise DeviceLost(f"the device no longer works in this process: {described(loss)}") from error


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host. On CUDA, the copy is complete once the work queued so far is done."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
