"""The border between deciding and computing: what an engine asks of a model runner. No torch here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from app.engine.batch import StepBatch, StepResult
from app.engine.stats import TakenBackend


class PendingStep(Protocol):
    """A step that the device may still be computing."""

    def draw(self, batch: StepBatch) -> None:
        """Draw the tokens of a step that was launched without. `batch` is the step's, with all that draws need."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. Called once, after its tokens are drawn."""
        ...


class BlockCopies(Protocol):
    """Copies whole blocks between KV memory and a buffer of the host. They wait until a copy is done."""

    states: BlockCopies | None = None  # of the slots for the states of recurrent layers, each as a block

    def take(self, block_id: int, buffer: memoryview) -> bool:
        """Fill the buffer with the bytes of a block; False where the memory is given up."""
        ...

    def put(self, block_id: int, buffer: memoryview) -> bool:
        """Fill a block that no step reads; False where the memory is given up."""
        ...


class BlockMemory(ABC):
    """KV memory as what is beside it sees it. Any thread may call."""

    block_bytes: int  # of one block, in all layers
    states: BlockMemory | None = None  # the slots for the states of recurrent layers, each as a block

    @abstractmethod
    def new_buffer(self) -> memoryview:
        """For the bytes of one block."""

    @abstractmethod
    def copies(self) -> AbstractContextManager[BlockCopies]:
        """To copy what the steps that were begun before have written, and into blocks of which no later one knows."""


class ModelRunner(ABC):
    """Turns a batch into tokens. `run` is all that it must have; the rest is for runners that can do more."""

    launches = False  # whether it has a device that computes while the host goes on: then `launch` is called
    adapts = False  # whether it may compute with LoRA adapters; else none is loaded
    can_sleep = False  # whether it gives up its memory in `sleep`
    num_padding_tokens = 0  # computed for nothing since the start, where steps have a few sizes only
    num_steps_without_graph = 0  # since the start, where a device replays steps from graphs
    backend: TakenBackend | None = None  # of a GPU

    @abstractmethod
    def run(self, batch: StepBatch) -> StepResult:
        """Compute the batch and draw one token id for each of `batch.sampled`; log-probabilities as requested.

        Raises:
            DeviceLost: the device is of no more use to this process. Any other error may be a request's fault.
        """

    def prepare(self) -> None:
        """Do what the first step would do otherwise, in the thread that computes; may take seconds."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start computing the batch; steps run in the order of their launch. A negative token id -1 - n in it is the
        placeholder of the n-th token that the step launched before draws.

        Where `batch.lacks_history`, no token is drawn before `PendingStep.draw`.
        """
        raise NotImplementedError(f"{type(self).__name__} launches no steps")

    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        """Read an adapter, for `ScheduledSequence.adapter`. Any thread may call, beside a step.

        `make_room` is called when it is read, and before it takes memory of its own: it may unload another.
        Raises UnsupportedAdapter, and what `make_room` raises.
        """
        raise NotImplementedError(f"{type(self).__name__} computes with no adapters")

    def unload_adapter(self, adapter: object) -> None:
        """No step that is run or launched from now on has it; one that is launched already may. Any thread may call."""

    def kv_memory(self) -> BlockMemory | None:
        """Its KV memory, block by block; None: no other thread may copy it, or it sleeps. Any thread may call."""
        return None

    def sleep(self) -> None:
        """Give up the memory of weights and KV. No step follows before `wake`."""

    def wake(self) -> None:
        """Have the weights again, and KV memory with nothing in it; may take seconds. The thread of `run` calls."""

    def check(self) -> None:
        """Raise DeviceLost if another process of it has ended. Any thread may call."""

    def close(self) -> None:
        """End its other processes. It must not be used afterwards."""
