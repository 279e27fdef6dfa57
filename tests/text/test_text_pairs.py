"""Pairs of texts are encoded as transformers encodes them, and cut where they are too long."""

from __future__ import annotations

import pytest

from app.text import Tokenizer
from tests.tiny_encoders import CLS, SEP, tiny_tokenizer

QUERY, DOCUMENTS = "w5 w6 w7", ["w8 w9", "w10", "", "w11 w12 w13 w14 w15"]


@pytest.fixture(params=[False, True], ids=["bert", "roberta"])
def is_roberta(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_pairs_are_those_of_transformers(is_roberta: bool) -> None:
    theirs, ours = tiny_tokenizer(is_roberta=is_roberta), Tokenizer(tiny_tokenizer(is_roberta=is_roberta))
    pairs = ours.pairs([QUERY], DOCUMENTS)
    encoded = pairs.encoded()
    expected = theirs([QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert [list(pair.token_ids) for pair in encoded] == expected["input_ids"]
    if not is_roberta:
        types = [[0] * pair.second_at + [1] * (len(pair.token_ids) - pair.second_at) for pair in encoded]
        assert types == expected["token_type_ids"]
    else:
        assert {pair.second_at for pair in encoded} == {0}
    assert pairs.num_tokens == sum(len(pair.token_ids) for pair in encoded)


def test_each_text_may_have_its_own_other() -> None:
    pairs = Tokenizer(tiny_tokenizer()).pairs(["w5", "w6"], ["w7", "w8"]).encoded()
    assert [pair.token_ids for pair in pairs] == [(CLS, 5, SEP, 7, SEP), (CLS, 6, SEP, 8, SEP)]


def test_the_second_text_is_cut_to_a_number_and_to_what_there_is_room_for() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    [short, *_, long] = tokenizer.pairs([QUERY], DOCUMENTS, max_second=2, longest=100).encoded()
    assert short.token_ids == (CLS, 5, 6, 7, SEP, 8, 9, SEP)
    assert long.token_ids == (CLS, 5, 6, 7, SEP, 11, 12, SEP)
    [*_, long] = tokenizer.pairs([QUERY], DOCUMENTS, max_second=50, longest=9).encoded()
    assert long.token_ids == (CLS, 5, 6, 7, SEP, 11, 12, 13, SEP)
    [text] = tokenizer.encode_up_to(["w4 w5 w6"], 50, longest=4)
    assert text == ((CLS, 4, 5, SEP), 0)


def test_a_tokenizer_may_leave_types_out() -> None:
    plain = tiny_tokenizer()
    plain.init_kwargs["model_input_names"] = ["input_ids", "attention_mask"]
    [pair] = Tokenizer(plain).pairs([QUERY], ["w8"]).encoded()
    assert pair == ((CLS, 5, 6, 7, SEP, 8, SEP), 0)


def test_texts_alone_are_those_of_encode() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    for encoded, text in zip(tokenizer.encode_up_to(DOCUMENTS), DOCUMENTS, strict=True):
        assert encoded.token_ids == tokenizer.encode(text, add_special_tokens=True)
