"""A bulk run with engines that count each sampled token: `python -m benchmarks.bulk.counted FILE --input …`.

Each step appends a line with its number of tokens to FILE in one system call, so the count survives any kill. The rest
of the command line is that of `python -m deployments.bulk`. `benchmarks.bulk.kills` runs this module.
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
    """Replaces the class of the same name, because Ray takes the titles of processes from the class name."""

    def load(self) -> ModelInfo:
        model_info = super().load()
        worker = self._worker
        assert worker is not None, "loaded"
        count = os.open(COUNT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        book = worker._book

        def counted(deltas: Sequence[TokenDelta]) -> None:
            os.write(count, b"%d\n" % sum(len(delta.token_ids) for delta in deltas))
            book(deltas)

        worker._book = counted  # type: ignore[method-assign]
        return model_info


if __name__ == "__main__":
    vars(pool)["EngineActor"] = EngineActor
    sys.exit(main(sys.argv[2:]))
