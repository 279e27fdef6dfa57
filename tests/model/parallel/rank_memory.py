"""The memory of the host that ranks take while they load: `python -m tests.model.parallel.rank_memory MODEL RANKS`."""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection

import torch

from app.model.allocated_bytes import num_bytes_of
from app.model.planned_memory import planned_gpu_model
from tests.kit.models import config_of, load
from tests.memory import peak_of_memory, resident_bytes
from tests.model.parallel.cuda_rank import group_of
from tests.waiting import PATIENCE_S

DTYPE = "bfloat16"


def weight_bytes(path: str, size: int) -> int:
    """Of the part that each of `size` ranks has, its whole embedding included."""
    config = config_of(path, dtype=DTYPE, backend="torch")
    return num_bytes_of(planned_gpu_model(config, dtype=torch.bfloat16, num_ranks=size).tensors())


def memory_of_ranks(path: str, size: int) -> list[tuple[int, int]]:
    """Bytes that each has before it loads, and at most while it does, beside those. Each is a process on a CPU."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, ranks = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            ends.append(ours)
            ranks.append(context.Process(target=_load, args=(theirs, rank, size, f"{folder}/store", path)))
        try:
            for each in ranks:
                each.start()
            return [end.recv() for end in ends if end.poll(PATIENCE_S)]
        finally:
            for each in ranks:
                each.kill()
                each.join()


def _load(pipe: Connection, rank: int, size: int, store: str, path: str) -> None:
    gc.freeze()  # as in `cuda_rank.answer`
    torch.set_num_threads(1)
    group, before = group_of(rank, size, store), resident_bytes()
    with peak_of_memory() as peak:
        load(path, group=group, dtype=DTYPE, num_threads=1)
    pipe.send((before, peak.grown_bytes))


if __name__ == "__main__":
    own = weight_bytes(sys.argv[1], int(sys.argv[2]))
    for rank, (before, peak) in enumerate(memory_of_ranks(sys.argv[1], int(sys.argv[2]))):
        print(json.dumps({"rank": rank, "weights": own, "before": before, "peak": peak, "share": round(peak / own, 2)}))
