"""A request's progress inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from app.engine.blocks import Block
from app.engine.request import Request


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's mutable record of one request.

    There is no prefill state and no decode state, only two counters: a step brings `num_computed_tokens` (tokens whose
    KV is in the cache) closer to `num_tokens` (prompt and generated so far).

        prompt ................ generated .....
        |-- computed --|-- uncomputed --------|   num_tokens
    """

    request: Request
    arrival: int  # order of arrival, unique
    token_ids: list[int] = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first joined
    num_preemptions: int = 0
    blocks: list[Block] = field(default_factory=list)  # in token order
    block_ids: list[int] = field(default_factory=list)  # their ids; replaced, never shortened, so batches may keep it
    prefix_ids: list[int] = field(default_factory=list)  # of its full, computed blocks

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def extend_blocks(self, blocks: list[Block]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)

    def take_blocks(self) -> list[Block]:
        """Give up all blocks and with them all computed tokens; the caller frees them."""
        blocks = self.blocks
        self.blocks, self.block_ids, self.prefix_ids = [], [], []
        self.num_computed_tokens = 0
        return blocks
