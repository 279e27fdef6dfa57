"""A rank that loads a model by the backends of a GPU, in Triton's interpreter."""

from __future__ import annotations

from app.config import EngineConfig
from app.errors import CarouselError
from app.model.loader import load_runner
from app.rank import follow
from tests.model.parallel.fake_rank import joined


def main(config: EngineConfig, descriptor: int, parent: int) -> None:
    channel, group = joined(descriptor, parent)
    try:
        loaded = load_runner(config, group=group)
    except CarouselError as error:
        channel.send_error(error)
        return
    follow(channel, loaded.runner, group)
