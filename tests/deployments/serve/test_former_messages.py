"""What processes of the version before (598b9f6) send through Serve's handles, while an update of code goes on."""

from __future__ import annotations

import pickle

from app.engine.request import ModelInfo
from deployments.serve.transport import FramesFrom

FRAMES_FROM = (
    b"\x80\x05\x95>\x00\x00\x00\x00\x00\x00\x00\x8c\x1bdeployments.serve.transport\x94\x8c\nFramesFrom\x94\x93\x94)\x81"
    b"\x94]\x94(\x8c\x02r0\x94N}\x94eb."
)
MODEL_FACTS = (
    b"\x80\x05\x95<\x00\x00\x00\x00\x00\x00\x00\x8c\x12app.engine.request\x94\x8c\nModelFacts\x94\x93\x94)\x81\x94]\x94("
    b"M\x00\x08M\xfb\x02K\x01\x85\x94N\x88\x89)Neb."
)


def test_an_ingress_of_the_version_before_may_connect() -> None:
    asked = pickle.loads(FRAMES_FROM)
    assert (asked.replica_id, getattr(asked, "table", {})) == ("r0", {})


def test_what_an_ingress_asks_has_the_fields_of_the_version_before_in_their_places() -> None:
    asked = FramesFrom("r0", table={})
    assert asked.__getstate__()[:3] == ["r0", None, {}]  # type: ignore[index]


def test_the_facts_of_a_replica_of_the_version_before_are_read() -> None:
    assert pickle.loads(MODEL_FACTS) == ModelInfo(max_model_len=2048, vocab_size=763, eos_token_ids=(1,))
