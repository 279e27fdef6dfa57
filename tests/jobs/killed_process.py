"""A process to be killed, which goes on with the only batch.

    python -m tests.jobs.killed_process FOLDER LOG NUM_LINES MOST

Writes a byte to LOG for every line that it answers, at most MOST of them, and ends when the batch has.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.batches import ItemOrigin, ItemResponse, PageOf
from tests.kit.jobs import OWNER, begin, input_line, jsonl, ok, service_in, until

MAX_IN_FLIGHT = 16


async def main(folder: Path, log: int, num_lines: int, most: int) -> None:
    places = asyncio.Semaphore(most)

    async def answer(owner: str, endpoint: str, body: Mapping[str, Any], origin: ItemOrigin) -> ItemResponse:
        await asyncio.sleep(0.005)
        await places.acquire()
        os.write(log, b".")
        return ok(body["name"])

    async with service_in(folder, answer, max_in_flight=MAX_IN_FLIGHT) as service:
        batches = (await service.batches(PageOf(owner=OWNER, limit=10)))["data"]
        if batches:
            batch_id = batches[0]["id"]
        else:
            batch_id = await begin(service, jsonl(*(input_line(f"line-{n}") for n in range(num_lines))))
        await until(service, batch_id)


if __name__ == "__main__":
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run(main(Path(sys.argv[1]), log, int(sys.argv[3]), int(sys.argv[4])))
