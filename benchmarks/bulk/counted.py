"""A bulk run with engines that count each token they draw: `python -m benchmarks.bulk.counted FILE --input …`.

Each step appends one line with its number of tokens to FILE, by one system call, so the count outlives every process.
The rest of the command line is that of `python -m deployments.bulk`. Run by `benchmarks.bulk.kills`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from app.engine.request import ModelInfo, TokenDelta
from deployments.bulk import pool
from deployments.bulk.__main__ import main

COUNT = sys.argv[1]


class EngineActor(pool.EngineActor):
    """Has the name of the class that it replaces: Ray titles the processes by it."""

    def load(self) -> ModelInfo:
        facts = super().load()
        worker = self._worker
        assert worker is not None, "loaded"
        count = os.open(COUNT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        book = worker._book

        def counted(deltas: Sequence[TokenDelta]) -> None:
            os.write(count, b"%d\n" % sum(len(delta.token_ids) for delta in deltas))
            book(deltas)

        worker._book = counted  # type: ignore[method-assign]
        return facts


if __name__ == "__main__":
    vars(pool)["EngineActor"] = EngineActor
    sys.exit(main(sys.argv[2:]))
