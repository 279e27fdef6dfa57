"""Where a request finds its beginning cached: the prompt prefixes and the sessions that each replica was sent."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence


class PrefixIndex:
    """For each replica the prefixes it was sent, as chained hashes of whole blocks, the longest unused forgotten first.

    The replica's own cache works by the same rules (blocks of `block_size` tokens, its least recently used leaves
    evicted), so the index is a guess at it that costs no message. A wrong guess, or two prompts with equal hashes,
    costs time and never content: the replica compares the tokens. The idea is the approximate radix tree of SGLang's
    cache-aware router; hashes instead of a tree make a match one walk over the prompt, whatever was sent before.
    """

    def __init__(self, *, block_size: int, max_tokens: int) -> None:
        """`max_tokens`: what the KV memory of one replica holds."""
        self._block_size = block_size
        self._max_blocks = max_tokens // block_size
        # A prefix is touched after those that continue it. So a prefix in here has all its own prefixes in here too.
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica_id: str, chain: Sequence[int]) -> None:
        """A replica has been sent the prompt with this chain, or has computed its tokens."""
        blocks = self._blocks.setdefault(replica_id, OrderedDict())
        for block in reversed(chain[: self._max_blocks]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def match(self, chain: Sequence[int]) -> dict[str, int]:
        """How many tokens of a prompt each replica should have cached; replicas without any are left out."""
        found = {}
        for replica_id, blocks in self._blocks.items():
            if chain and chain[0] in blocks:
                found[replica_id] = _num_first_in(blocks, chain) * self._block_size
        return found

    def forget(self, replica_id: str) -> None:
        """A replica has nothing cached any more."""
        self._blocks.pop(replica_id, None)

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the replicas that are gone."""
        self._blocks = {each: blocks for each, blocks in self._blocks.items() if each in replica_ids}

    def chain(self, token_ids: Sequence[int], *, salt: str = "") -> list[int]:
        """A prompt as `add` and `match` take it: one hash for each whole block, of that block and all before it."""
        chain, block = [], hash(salt)
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            block = hash((block, tuple(token_ids[start : start + self._block_size])))
            chain.append(block)
        return chain


class Sessions:
    """The replica of each session, in bounded memory: the longest unused are forgotten first."""

    def __init__(self, *, max_sessions: int = 100_000) -> None:
        self._max_sessions = max_sessions
        self._replica_ids: OrderedDict[str, str] = OrderedDict()

    def place(self, session: str, replica_id: str) -> None:
        """A request of this session has gone to this replica."""
        self._replica_ids[session] = replica_id
        self._replica_ids.move_to_end(session)
        if len(self._replica_ids) > self._max_sessions:
            self._replica_ids.popitem(last=False)

    def replica_of(self, session: str) -> str | None:
        """The replica that has the session; None for an unknown one."""
        return self._replica_ids.get(session)

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the sessions of replicas that are gone."""
        kept = ((session, replica_id) for session, replica_id in self._replica_ids.items() if replica_id in replica_ids)
        self._replica_ids = OrderedDict(kept)


def _num_first_in(held: Collection[int], chain: Sequence[int]) -> int:
    """How many of a chain are held. They are its first, so halving finds where they end."""
    return bisect_left(chain, True, key=lambda block: block not in held)
