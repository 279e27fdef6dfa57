from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from app.errors import InvalidRequest, InvalidSetup
from app.text import Tokenizer

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi é 😀"}]


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    @given(st.text())
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True), skip_special_tokens=False) == text

    check()


def test_encoding_is_that_of_transformers(tokenizer: Tokenizer, demo_path: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(demo_path)
    for text in ("", "Count from 3 to 11.", "  é\n😀", "a<|end|>b"):
        for special in (True, False):
            assert list(tokenizer.encode(text, add_special_tokens=special)) == theirs.encode(
                text, add_special_tokens=special
            )
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(tokenizer.encode_chat(CHAT)) == expected


def test_the_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    with_prompt = tokenizer.encode_chat(CHAT)
    assert with_prompt[:-1] == tokenizer.encode_chat(CHAT, add_generation_prompt=False)


def test_special_tokens_are_hidden_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(CHAT)
    assert tokenizer.decode(ids) == "Be kind.Hi é 😀"
    assert "<|user|>" in tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.special_token_ids & set(ids)


def test_a_model_without_chat_template_says_so(awkward_tokenizer: Tokenizer) -> None:
    assert not awkward_tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        awkward_tokenizer.encode_chat(CHAT)


def test_the_template_of_a_processor_is_found(demo_path: Path, tmp_path: Path) -> None:
    shutil.copy(demo_path / "tokenizer.json", tmp_path)
    assert not Tokenizer.load(str(tmp_path)).has_chat_template
    template = tmp_path / "chat_template.json"
    template.write_text(json.dumps({"chat_template": "of the processor"}))
    assert Tokenizer.load(str(tmp_path)).render_chat(CHAT) == "of the processor"
    (tmp_path / "chat_template.jinja").write_text("of the tokenizer")
    assert Tokenizer.load(str(tmp_path)).render_chat(CHAT) == "of the tokenizer"
    (tmp_path / "chat_template.jinja").unlink()
    template.write_text("{}")
    with pytest.raises(InvalidSetup, match=r"chat_template\.json must contain an object"):
        Tokenizer.load(str(tmp_path))


def test_what_the_template_raises_is_the_requests_fault(demo_path: Path) -> None:
    pretrained = PreTrainedTokenizerFast.from_pretrained(demo_path)
    pretrained.chat_template = "{{ raise_exception('system messages must come first') }}"
    with pytest.raises(InvalidRequest, match="system messages must come first") as caught:
        Tokenizer(pretrained).encode_chat(CHAT)
    assert caught.value.param == "messages"


def test_template_variables_reach_the_template(demo_path: Path) -> None:
    pretrained = PreTrainedTokenizerFast.from_pretrained(demo_path)
    pretrained.chat_template = "{{ 'thinking' if enable_thinking else 'fast' }}"
    tokenizer = Tokenizer(pretrained)
    assert tokenizer.render_chat(CHAT) == "fast"
    assert tokenizer.render_chat(CHAT, template_variables={"enable_thinking": True}) == "thinking"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "self", "conversation", "tools"])
def test_template_variables_cannot_replace_our_own(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs may not contain {name}"):
        tokenizer.encode_chat(CHAT, template_variables={name: True})


def test_a_folder_without_tokenizer_is_an_invalid_setup(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"the tokenizer could not be loaded from .*tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


def test_threads_can_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"Count from {n} to {n + 7}. " * 200 for n in range(16)]
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: tokenizer.encode(text, add_special_tokens=False), texts)) == expected
