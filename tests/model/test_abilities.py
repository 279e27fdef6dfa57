"""What is said to work with a model does, and what is said not to is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.errors import InvalidSetup
from app.model.abilities import Abilities
from app.model.cpu.library import library
from app.model.implementations.native_decoder import NativeModel
from app.model.source import ModelSource
from tests.kit.models import config_of, load
from tests.tiny_models import NATIVE, build_tiny_model


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "lfm2", "phi3"])
def test_what_does_not_work_is_refused(architecture: str, tmp_path: Path) -> None:
    build_tiny_model(architecture).save_pretrained(tmp_path)
    model, config = load(tmp_path), config_of(tmp_path)
    refused, has_states = model.abilities.why_not(), architecture == "lfm2"
    assert ("C++ on a CPU" in refused) == (architecture not in NATIVE) == (not isinstance(model, NativeModel))
    source = ModelSource(config=config.model, location=str(tmp_path), device=torch.device("meta"), dtype=torch.float32)
    assert ("ranks" in refused) == has_states
    if has_states:
        with pytest.raises(InvalidSetup, match="cannot be split among ranks"):
            source.check_ranks(2)
    else:
        source.check_ranks(2)
    assert ("freed windows" not in model.with_window_groups().abilities.why_not()) == (architecture == "gemma2")


def test_the_line_says_what_does_not_work_and_why() -> None:
    known = Abilities(architecture="MistralForCausalLM", has_states=False, windows="freed")
    assert str(known) == "MistralForCausalLM supports everything"
    other = Abilities(architecture="OtherForCausalLM", has_states=True, windows="none")
    assert "int8 and int4 (only the C++ decoder packs weights)" in str(other)
    assert "ranks (recurrent layers cannot be split)" in str(other)
