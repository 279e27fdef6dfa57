"""Where each session's last request went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


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
