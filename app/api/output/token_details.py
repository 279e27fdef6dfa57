"""What a call may want to know of its tokens beside their text: their ids, how likely they were, where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from app.engine.request import Request, TokenDelta, TokenLogprobs
from app.text import Tokenizer, TokenOffsets

LEAST_LOGPROB = -9999.0  # what an impossible token is said to have: JSON has no infinity

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWishes:
    """Which details a call wants."""

    logprobs: int | None = None  # of generated tokens, and of an echoed prompt's, with so many of the likeliest
    names_are_ids: bool = False  # tokens are named by their ids
    prompt_logprobs: int | None = None  # in the format of vLLM
    token_ids: bool = False
    echo: bool = False  # the prompt is part of the text
    choose_best: bool = False  # of several samples, by how likely they were

    def __bool__(self) -> bool:
        return self != TokenWishes()

    @property
    def drawn_logprobs(self) -> int | None:
        """What the engine is asked for of the tokens that it draws."""
        return 0 if self.logprobs is None and self.choose_best else self.logprobs

    def scored_logprobs(self, *, is_first: bool) -> int | None:
        """And of the prompt's; vLLM's format has them once for each prompt, so only its first sample is asked."""
        echoed = self.logprobs if self.echo else None
        wanted = [num for num in (echoed, self.prompt_logprobs if is_first else None) if num is not None]
        return max(wanted, default=None)


class ToldToken(NamedTuple):
    """A token in the text of a choice, the prompt's among them where it is echoed."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for the first of a prompt, which nothing predicts
    offset: int  # in characters of the choice's text


@dataclass(slots=True)
class Details:
    """Of the tokens of one piece."""

    token_ids: tuple[int, ...]  # that were generated
    told: list[ToldToken]  # for `logprobs`: those of an echoed prompt, then those that were generated
    logprobs: tuple[TokenLogprobs, ...]  # of `token_ids`
    prompt_logprobs: tuple[TokenLogprobs, ...]  # of the prompt's next tokens


class Telling:
    """One choice's tokens as they come. An echoed prompt is part of the first piece that has anything to tell."""

    def __init__(
        self,
        wishes: TokenWishes,
        request: Request,
        tokenizer: Tokenizer,
        *,
        prompt_text: str,
        skip_special_tokens: bool,
    ) -> None:
        """`prompt_text` is what is echoed."""
        self._wishes = wishes
        self._prompt = request.prompt_token_ids if wishes.echo else ()
        self._prompt_text = prompt_text if wishes.echo else ""
        self._has_echoed = not wishes.echo
        self._num_prompt_told = 0
        self._prompt_offsets = TokenOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offsets = TokenOffsets(tokenizer, skip_special_tokens=skip_special_tokens)

    def tell(self, delta: TokenDelta, *, num_tokens: int, has_ended: bool) -> tuple[str, Details] | None:
        """The text that goes before the delta's own, and the details of its first `num_tokens` tokens.

        None while there is nothing to tell.
        """
        if not (num_tokens or has_ended or delta.prompt_logprobs):
            return None
        echoed = "" if self._has_echoed else self._prompt_text
        self._has_echoed = True
        token_ids = delta.token_ids[:num_tokens]
        told: list[ToldToken] = []
        if self._wishes.logprobs is not None:
            told = self._told_of_prompt(delta.prompt_logprobs) + self._told_of_drawn(token_ids, delta.logprobs)
        return echoed, Details(token_ids, told, delta.logprobs[:num_tokens], delta.prompt_logprobs)

    def _told_of_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> list[ToldToken]:
        """The next tokens of an echoed prompt. Nothing predicts its first, which comes with whatever comes first."""
        first, most = self._num_prompt_told, len(self._prompt_text)
        found = logprobs if first else (None, *logprobs)
        token_ids = self._prompt[first : first + len(found)]
        self._num_prompt_told += len(token_ids)
        return [
            ToldToken(token_id, each, min(offset, most))
            for token_id, each, offset in zip(token_ids, found, self._prompt_offsets.push(token_ids), strict=False)
        ]

    def _told_of_drawn(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> list[ToldToken]:
        before = len(self._prompt_text)
        return [
            ToldToken(token_id, each, before + offset)
            for token_id, each, offset in zip(token_ids, logprobs, self._offsets.push(token_ids), strict=False)
        ]


class TokenNames:
    """How tokens are called in answers: by their text, those that end within a character by their bytes."""

    def __init__(self, tokenizer: Tokenizer, *, are_ids: bool = False) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._are_ids = are_ids

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._are_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """By its text or bytes in any case; two tokens may have the same."""
        found = self._bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes(self, token_id: int) -> list[int]:
        return list(self._bytes_of(token_id))


def chat_logprobs(told: list[ToldToken], names: TokenNames, num_top: int) -> Json:
    """`logprobs` as the chat endpoint has it."""

    def entry(token_id: int, logprob: float) -> Json:
        return {"token": names(token_id), "logprob": _finite(logprob), "bytes": names.bytes(token_id)}

    content = []
    for token_id, found, _ in told:
        assert found is not None, "no prompt is echoed in a chat"
        top = [entry(*each) for each in list(zip(found.top_token_ids, found.top_logprobs, strict=True))[:num_top]]
        content.append(entry(token_id, found.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(told: list[ToldToken], names: TokenNames, num_top: int) -> Json:
    """`logprobs` as the completions endpoint has it: four lists, one entry for each token."""
    return {
        "tokens": [names(each.token_id) for each in told],
        "token_logprobs": [None if each.logprobs is None else _finite(each.logprobs.logprob) for each in told],
        "top_logprobs": [_top_map(each, names, num_top) for each in told],
        "text_offset": [each.offset for each in told],
    }


def _top_map(told: ToldToken, names: TokenNames, num_top: int) -> dict[str, float] | None:
    """The likeliest tokens, and the one that is there; where names are equal, the less likely go by their ids."""
    found = told.logprobs
    if found is None:
        return None
    likely = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[:num_top]
    if told.token_id not in found.top_token_ids[:num_top]:
        likely.append((told.token_id, found.logprob))
    top: dict[str, float] = {}
    for token_id, logprob in likely:
        name = names(token_id)
        top[name if name not in top else f"token_id:{token_id}"] = _finite(logprob)
    return top


def prompt_logprobs_entries(
    token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], names: TokenNames, *, num_top: int
) -> list[Json]:
    """`prompt_logprobs` as vLLM has it: for each token a map of ids, the token's own among them."""
    return [_ranked(token_id, found, names, num_top) for token_id, found in zip(token_ids, logprobs, strict=False)]


def _ranked(token_id: int, found: TokenLogprobs, names: TokenNames, num_top: int) -> Json:
    ranked = {token_id: (found.logprob, found.rank)}
    for rank, (each, logprob) in enumerate(zip(found.top_token_ids[:num_top], found.top_logprobs, strict=False), 1):
        ranked.setdefault(each, (logprob, rank))
    return {
        str(each): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(each)}
        for each, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
