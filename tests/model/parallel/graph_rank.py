"""A rank with a GPU's runner, in Triton's interpreter: python -m tests.model.parallel.graph_rank SOCKET PARENT PATH"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from app.model.cuda.graph_runner import GraphModelRunner
from app.model.parallel.group import RankGroup
from app.model.ways.loaded_model import LoadedModel
from app.rank import follow
from tests.kit.interpreter import quicken_interpreter
from tests.kit.models import load
from tests.model.cuda.test_graph_runner import RunAgain, attention_for
from tests.model.parallel.fake_rank import joined


def model_and_runner(path: Path, group: RankGroup) -> tuple[LoadedModel, GraphModelRunner]:
    """All ranks call it together."""
    model = load(path, backend="torch", group=group)
    return model, GraphModelRunner(model, attention_for(model), max_rows=2, capture=RunAgain())


def main(descriptor: int, parent: int, path: Path) -> None:
    torch.set_num_threads(1)
    quicken_interpreter(pytest.MonkeyPatch())
    channel, group = joined(descriptor, parent)
    follow(channel, model_and_runner(path, group)[1], group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)
