"""The interface of a model runner, which computes the batches that an engine schedules. Does not use torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from app.engine.batch import StepBatch, StepResult
from app.engine.stats import ChosenBackend


class PendingStep(Protocol):
    """A step that the device may still be computing."""

    def draw(self, batch: StepBatch) -> None:
        """Draw the tokens of a step that was launched with `lacks_history`. `batch` is its batch, now with history."""
        ...

    def result(self) -> StepResult:
        """Block until the step is done and return its result. Called once, after `draw` if the batch lacks history."""
        ...


class BlockCopies(Protocol):
    """Copies whole blocks between KV memory and a host buffer. Each method blocks until its copy is done."""

    states: BlockCopies | None = None  # copies the state slots of recurrent layers, with each slot as a block

    def take(self, block_id: int, buffer: memoryview) -> bool:
        """Copy a block to the buffer. Returns False if the engine has released the memory."""
        ...

    def put(self, block_id: int, buffer: memoryview) -> bool:
        """Copy the buffer to a block that no step is using. Returns False if the engine has released the memory."""
        ...


class BlockMemory(ABC):
    """KV memory as seen by a store or another replica. Thread-safe."""

    block_bytes: int  # the size of one block, over all layers
    states: BlockMemory | None = None  # the state slots of recurrent layers, with each slot as a block

    @abstractmethod
    def new_buffer(self) -> memoryview:
        """Return a new host buffer for one block."""

    @abstractmethod
    def copies(self) -> AbstractContextManager[BlockCopies]:
        """Open a context for copying while steps run. Copies see the results of all earlier steps.

        A block that is passed to `put` must not be used by any step in the meantime.
        """


class ModelRunner(ABC):
    """Turns a batch into tokens. A runner must implement `run`; all other methods are optional."""

    launches = False  # whether the engine may call `launch`, because a device computes while the host continues
    adapts = False  # whether the runner supports LoRA adapters
    can_sleep = False  # whether `sleep` releases memory
    num_padding_tokens = 0  # padding tokens computed so far, if steps have only a few sizes
    num_steps_without_graph = 0  # steps so far that were not replayed from a graph, if the device uses graphs
    backend: ChosenBackend | None = None  # the GPU backend, if any

    @abstractmethod
    def run(self, batch: StepBatch) -> StepResult:
        """Compute the batch, draw one token id for each of `batch.sampled`, and return requested log-probabilities.

        Raises:
            DeviceLost: this process can no longer use the device. Any other error may be a request's fault.
        """

    def prepare(self) -> None:
        """Do the slow preparations for the first step in advance, in the thread of `run`. May take seconds."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start computing the batch. Steps run in the order in which they were launched.

        A negative token id -1 - n in the batch stands for the n-th token drawn by the previously launched step. If
        `batch.lacks_history`, no token is drawn before `PendingStep.draw`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support launching steps")

    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        """Load an adapter. Returns the object for `ScheduledSequence.adapter`. Thread-safe, even during a step.

        After reading the files and before allocating memory, the runner calls `make_room`, which may unload another
        adapter. Raises UnsupportedAdapter and the errors of `make_room`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support adapters")

    def unload_adapter(self, adapter: object) -> None:
        """Unload an adapter that no later step will use. Steps in flight may still use it. Thread-safe."""

    def kv_memory(self) -> BlockMemory | None:
        """Return the KV memory, or None if the runner sleeps or does not support copies. Thread-safe."""
        return None

    def sleep(self) -> None:
        """Release the memory of weights and KV. The engine runs no step until `wake`."""

    def wake(self) -> None:
        """Restore the weights and allocate empty KV memory, which may take seconds. Called in the thread of `run`."""

    def check(self) -> None:
        """Raise DeviceLost if one of this runner's other processes has ended. Thread-safe."""

    def close(self) -> None:
        """Stop this runner's other processes. Do not use the runner afterwards."""
