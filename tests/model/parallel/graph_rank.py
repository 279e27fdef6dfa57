"""A rank with a GPU's runner, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from app.model.cuda.graph_runner import GraphModelRunner
from app.model.implementations.loaded_model import LoadedModel
from app.model.parallel.group import RankGroup
from app.rank import follow
from tests.kit.models import load
from tests.model.cuda.test_graph_runner import RunAgain, RunsOutAt, attention_for
from tests.model.parallel.fake_rank import joined


def model_and_runner(
    path: Path, group: RankGroup, room: int | None = None, max_adapters: int | None = None
) -> tuple[LoadedModel, GraphModelRunner]:
    """All ranks call it together. room: for so many graphs on rank 1; there are steps with prompts among them then.

    max_adapters: the model is computed by the decoder for CUDA, with so many.
    """
    backend = "torch" if max_adapters is None else "auto"
    model = load(path, backend=backend, num_threads=1, group=group, max_loaded_adapters=max_adapters)
    capture = RunAgain() if room is None else RunsOutAt(room if group.rank == 1 else 99)
    max_tokens = 0 if room is None else 4
    return model, GraphModelRunner(model, attention_for(model), max_rows=2, max_tokens=max_tokens, capture=capture)


def main(path: Path, room: int | None, max_adapters: int | None, descriptor: int, parent: int) -> None:
    channel, group = joined(descriptor, parent)
    follow(channel, model_and_runner(path, group, room, max_adapters)[1], group)
