"""A rank with a GPU's runner, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from app.model.cuda.graph_runner import GraphModelRunner
from app.model.parallel.group import RankGroup
from app.model.ways.loaded_model import LoadedModel
from app.rank import follow
from tests.kit.models import load
from tests.model.cuda.test_graph_runner import RunAgain, attention_for
from tests.model.parallel.fake_rank import joined


def model_and_runner(path: Path, group: RankGroup) -> tuple[LoadedModel, GraphModelRunner]:
    """All ranks call it together."""
    model = load(path, backend="torch", num_threads=1, group=group)
    return model, GraphModelRunner(model, attention_for(model), max_rows=2, capture=RunAgain())


def main(path: Path, descriptor: int, parent: int) -> None:
    channel, group = joined(descriptor, parent)
    follow(channel, model_and_runner(path, group)[1], group)
