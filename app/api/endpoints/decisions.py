"""POST /v1/decisions: answers questions about one input with the probabilities of labels as the first reply token.

Each question becomes one request that generates one token. Its prompt is a user message in the model's chat template.
The message starts with the input, so all questions share a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from string import ascii_uppercase, digits
from types import MappingProxyType
from typing import ClassVar, Literal, NotRequired

from typing_extensions import TypedDict

from app.api.endpoints.endpoint import Endpoint
from app.api.generation import check_call_tokens, encode_prompts, generates_nothing, prepare_prompts
from app.api.output.answer import ResponsesUsage
from app.api.output.choices import ChoiceDelta
from app.api.output.readouts import ReadoutWriter
from app.api.output.response_state import ResponseState
from app.api.prepared_request import PreparedRequest, ServedModel, TokenDetailOptions
from app.api.request_context import RequestContext
from app.api.schemas.decisions import AnyQuestion, Choice, DecisionsRequest, Option, Predicate, Score, ScoreLevel
from app.engine.request import ModelInfo, SamplingParams
from app.errors import ContextTooLong, Failure, InvalidRequest, Unavailable
from app.json_pieces import Json, Rows
from app.text import Tokenizer
from app.text.text_pairs import EncodedText

PROMPT_VERSION = 1  # version of the prompt's wording; any change to the wording changes the probabilities

_YES_OR_NO = (("Yes", "No"), ("yes", "no"), ("A", "B"))  # the first pair whose labels are one token each is used
# Questions with more choices than letters also use pairs of letters that are one token.
_LETTERS = tuple(ascii_uppercase)
_PAIRS = tuple(map("".join, product(ascii_uppercase, repeat=2)))
_Labels = Mapping[str, int]  # the token of each of a question's labels, in the order of its answers


def prepare_decisions(body: DecisionsRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize the questions. Raises InvalidRequest."""
    if not model.model_info.generates:
        raise generates_nothing(model)
    if not model.tokenizer.has_chat_template:
        raise InvalidRequest(f"the model {model.name!r} has no chat template; choose another model", param="model")
    frame = _Frame.around(body.input, model)
    labels = _labels_of(body.questions, frame.reply, model)
    ends = [_message_end(each, its) for each, its in zip(body.questions, labels, strict=True)]
    prepared = prepare_prompts(
        "dec-",
        body,
        model,
        context,
        map(EncodedText, frame.prompts(ends, model)),
        samplings=[
            SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=tuple(its.values())
            )
            for its in labels
        ],
    )
    return replace(
        prepared,
        requests=tuple([replace(each, call=prepared.response_id) for each in prepared.requests]),
        num_logprobs=sum(1 + len(its) for its in labels),
        detail_options=TokenDetailOptions(logprobs=0),
        first_runs_alone=True,
    )


# ---------------------------------------------------------------------- prompts


def _message_begin(text: str) -> str:
    """Return the start of the message, which all questions share. A token usually ends before `_message_end`."""
    return f"{text}\n\nQuestion"


def _message_end(question: AnyQuestion, labels: _Labels) -> str:
    """Return the rest of the message for one question. It starts with a colon and ends with a full stop."""
    answers: Sequence[Option | ScoreLevel]
    if isinstance(question, Predicate):
        answers = [Option(value="Yes"), Option(value="No")] if "A" in labels else []
    else:
        answers = question.choices if isinstance(question, Choice) else question.levels
    if not answers:
        asked = f"Answer with {' or '.join(labels)}."
    elif isinstance(question, Score):
        asked = f"{_listed(answers, labels)}\nAnswer with the number of one level."
    else:
        asked = f"{_listed(answers, labels)}\nAnswer with the letter of one option."
    return f": {question.instructions}\n\n{asked}"


def _listed(answers: Sequence[Option | ScoreLevel], labels: Iterable[str]) -> str:
    lines = []
    for each, label in zip(answers, labels, strict=True):
        name = each.label if isinstance(each, ScoreLevel) else each.value
        text = str(name).lower() if isinstance(name, bool) else name
        lines.append(f"{label}. {text}: {each.description}\n" if each.description else f"{label}. {text}\n")
    return "".join(lines)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text around each question. `begin` ends inside the message, and `reply` starts after the message."""

    begin: str
    reply: str

    @classmethod
    def around(cls, text: str, model: ServedModel) -> _Frame:
        """Render the frame with the model's chat template, without reasoning. Raises InvalidRequest."""
        placeholder = ": the question of this request."
        rendered = model.tokenizer.render_chat(
            [{"role": "user", "content": _message_begin(text) + placeholder}],
            template_variables={"enable_thinking": False, "reasoning_effort": "none"},
        )
        begin, found, reply = rendered.rpartition(placeholder)
        if not found:
            raise InvalidRequest(
                f"the chat template of {model.name!r} changes the text of messages; choose another model", param="model"
            )
        marks = model.reasoning_marks
        if marks is not None and marks.are_open(reply):
            reply += f"{marks.end}\n\n"
        return cls(begin, reply)

    def prompts(self, ends: Sequence[str], model: ServedModel) -> list[tuple[int, ...]]:
        """Return the token ids of one prompt for each of `ends` (see `_message_end`).

        Raises InvalidRequest if a prompt is too long.
        """
        ends = [end + self.reply for end in ends]
        [first] = encode_prompts([self.begin + ends[0]], model, "input", add_special_tokens=False)
        of_ends = encode_prompts(ends, model, "questions", add_special_tokens=False)
        num_shared = len(first) - len(of_ends[0])
        _check_lengths(num_shared, list(map(len, of_ends)), model)
        if first[num_shared:] == of_ends[0]:
            return [first[:num_shared] + end for end in of_ends]
        # A token spans the border between the two parts, so each prompt is encoded as a whole.
        return encode_prompts([self.begin + end for end in ends], model, "input", add_special_tokens=False)


def _check_lengths(num_shared: int, num_own: Sequence[int], model: ServedModel) -> None:
    most = model.model_info.max_model_len - 1
    for number, num_tokens in enumerate(num_own):
        if num_shared + num_tokens > most:
            raise ContextTooLong(
                f"`input` has {num_shared:,} tokens and `questions[{number}]` has {num_tokens:,} tokens; this model "
                f"accepts {most:,} tokens in total; shorten the input or the question",
                param="input" if num_shared >= num_tokens else f"questions[{number}]",
            )
    num_all = num_shared * len(num_own) + sum(num_own)
    check_call_tokens(num_all, model, f"{len(num_own):,} questions, each with the input,", "questions")


def _labels_of(questions: Sequence[AnyQuestion], reply: str, model: ServedModel) -> list[_Labels]:
    """Return labels for each question's answers. Raises InvalidRequest if too few labels are one token each."""
    most = max((len(each.choices) for each in questions if isinstance(each, Choice)), default=0)
    choices = _single_tokens(_LETTERS + (_PAIRS if most > len(_LETTERS) else ()), reply, model.tokenizer)
    levels, *pairs = (_single_tokens(each, reply, model.tokenizer) for each in (tuple(digits), *_YES_OR_NO))
    yes_or_no = next((pair for pair in pairs if len(pair) == 2), pairs[0])
    found = list[_Labels]()
    for number, question in enumerate(questions):
        if isinstance(question, Predicate):
            labels, wanted, param = yes_or_no, 2, "type"
        elif isinstance(question, Choice):
            labels, wanted, param = choices, len(question.choices), "choices"
        else:
            labels, wanted, param = levels, len(question.levels), "levels"
        if len(labels) < wanted:
            param = f"questions[{number}].{param}"
            raise InvalidRequest(
                f"{param} requires {wanted:,} labels that are single tokens, but the tokenizer of {model.name!r} has "
                f"only {len(labels):,}; choose another model, or offer fewer answers",
                param=param,
            )
        found.append(dict(islice(labels.items(), wanted)))
    return found


@lru_cache(maxsize=64)  # a model needs few entries; encoding 26 letters takes 0.5 ms, and 7 ms with the pairs
def _single_tokens(labels: tuple[str, ...], reply: str, tokenizer: Tokenizer) -> _Labels:
    """Return the labels that are one token at the start of the reply, mapped to that token."""
    before, *encoded = tokenizer.encode_all([f".{reply}", *(f".{reply}{label}" for label in labels)])
    return {
        label: token_ids[-1]
        for label, token_ids in zip(labels, encoded, strict=True)
        if token_ids[:-1] == before and tokenizer.token_text(token_ids[-1]).strip() == label
    }


# ---------------------------------------------------------------------- answers


def check_one_question(body: DecisionsRequest) -> None:
    """Raise InvalidRequest for an item of a bulk run with several questions."""
    if len(body.questions) != 1:
        message = (
            f"`questions` contains {len(body.questions):,} questions, but an item may have only one; write one item "
            f"per question"
        )
        raise InvalidRequest(message, param="questions")


class Decision(TypedDict):
    type: Literal["predicate", "choice", "score"]
    name: str | None
    probability: NotRequired[float]  # only for a predicate, which has none of the fields below
    choice: NotRequired[str | bool]
    score: NotRequired[float]
    probabilities: NotRequired[list[Json]]
    confidence: NotRequired[float]


class Decisions(TypedDict):
    model: str
    answers: Rows[Decision]
    usage: ResponsesUsage


@dataclass(frozen=True, slots=True)
class DecisionsWriter(ReadoutWriter[Sequence[float]]):
    """Writes the answers. The prompt version is a header, because OpenAI's schema allows no other fields."""

    headers: ClassVar[Mapping[str, str]] = MappingProxyType({"x-carousel-prompt-version": str(PROMPT_VERSION)})

    body: DecisionsRequest

    async def values(self, state: ResponseState) -> Sequence[Sequence[float]]:
        return await label_logprobs(state)

    def value(self, index: int, numbers: Sequence[float], model_info: ModelInfo) -> Sequence[float]:
        return _checked(index, numbers)

    def rows(self, values: Sequence[Sequence[float]], model_info: ModelInfo) -> Rows[Decision]:
        return Rows(lambda: ([answer_to(*each)] for each in zip(self.body.questions, values, strict=True)))

    def response(self, state: ResponseState, rows: Rows[Decision]) -> Decisions:
        return {"model": state.prepared.model.name, "answers": rows, "usage": state.usage_of_responses()}


async def label_logprobs(state: ResponseState) -> list[Sequence[float]]:
    """Wait for all requests, and return the log-probabilities of each one's labels. Raises Unavailable and Failure."""
    found: dict[int, Sequence[float]] = {}

    def keep(piece: ChoiceDelta) -> None:
        if piece.details is not None and piece.details.logprobs:
            found[piece.index] = piece.details.logprobs[0].top_logprobs

    await state.read(keep)
    for index, request in enumerate(state.prepared.requests):
        if len(found.get(index, ())) != len(request.sampling.logprob_token_ids):
            raise Unavailable(
                "this replica runs an older version, which returns no probabilities for labels; try again"
            )
    return [_checked(index, found[index]) for index in range(len(found))]


def _checked(index: int, logprobs: Sequence[float]) -> Sequence[float]:
    """Return the log-probabilities of a question's labels. Raises Failure if none of them is finite."""
    if not math.isfinite(max(logprobs)):
        raise Failure(f"the log-probabilities for the question with index {index} are not finite: {logprobs[:10]}")
    return logprobs


def answer_to(question: AnyQuestion, logprobs: Sequence[float]) -> Decision:
    """Return the answer from the log-probabilities of its labels. At least one of them must be finite.

    `confidence` is the probability of the likeliest label among all tokens of the vocabulary.
    """
    likeliest = max(logprobs)
    weights = [math.exp(each - likeliest) for each in logprobs]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    answer: Decision = {"type": question.type, "name": question.name}
    if isinstance(question, Predicate):
        answer["probability"] = shares[0]
        return answer
    if isinstance(question, Choice):
        values = [each.value for each in question.choices]
        answer["choice"] = values[logprobs.index(likeliest)]
        answer["probabilities"] = [
            {"value": value, "probability": share} for value, share in zip(values, shares, strict=True)
        ]
    else:
        answer["score"] = sum(level * share for level, share in enumerate(shares))
        answer["probabilities"] = [
            {"value": level, "label": each.label, "probability": share}
            for level, (each, share) in enumerate(zip(question.levels, shares, strict=True))
        ]
    answer["confidence"] = math.exp(likeliest)
    return answer


DECISIONS = Endpoint(
    "/v1/decisions",
    DecisionsRequest,
    prepare_decisions,
    DecisionsWriter,
    summary="Answer questions about a text by probabilities",
    response=Decisions,
    check_bulk=check_one_question,
)
