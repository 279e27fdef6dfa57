"""A request's run through the steps of a pipeline: the requests, deadlines and reports of the steps."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from urllib.parse import quote

from app.api.endpoints.endpoint import Endpoint
from app.api.output.answer import ChoiceOutput, MoreUsage
from app.api.output.choices import DeltaBuffer, close
from app.api.output.response_state import ResponseState
from app.api.output.token_details import LEAST_LOGPROB
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import GROUP_HEADER, PRESET_HEADER, RequestContext
from app.api.request_trace import PipelineStepTimes
from app.api.schemas.requests import GenerationRequest, QueuedRequest
from app.engine.request import Generate, Request, TokenDelta
from app.errors import DeadlineMissed, InvalidRequest
from app.json_pieces import Json
from app.metrics import RequestMetrics

MAX_DOCUMENTS_HEADER = 4096  # characters of the header with the ids of documents
_PLAIN = " !#$&'()*+-./:;=?@[]^_`{|}~"  # the header percent-encodes all but these characters, letters and digits

_REPLICA_HEADERS = (GROUP_HEADER, PRESET_HEADER)  # apply only to the replicas of the answering model


class Step(Protocol):
    """One step of a pipeline."""

    @property
    def name(self) -> str:
        """The name of the pipeline and the index of the step in it, such as `rag[0]`."""

    @property
    def kind(self) -> str:
        """The kind of the step in the config."""


class OtherPipeline(Protocol):
    """The interface through which a pipeline's step runs another pipeline."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> Sequence[ServedModel]:
        """All models that may run, without duplicates."""

    @property
    def answering_models(self) -> Sequence[ServedModel]:
        """The models that may answer, without duplicates."""

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run all steps before the first token of the answer, and return the pending answer."""


Target = ServedModel | OtherPipeline  # the model or pipeline that a step lets answer


@dataclass(slots=True, kw_only=True)
class StepReport:
    """The times and the decision of one step."""

    step: Step
    began_at: float  # on the monotonic clock
    ended_at: float | None = None
    decided: Json = field(default_factory=dict)

    def end(self, **decided: object) -> None:
        """Add fields to the step's decision. The first call also ends the step."""
        self.decided |= decided
        if self.ended_at is None:
            self.ended_at = time.monotonic()

    def as_json(self) -> Json:
        ended_at = time.monotonic() if self.ended_at is None else self.ended_at
        entry: Json = {"name": self.step.name, "kind": self.step.kind} | self._of_model()
        return entry | {"ms": round(1000 * (ended_at - self.began_at), 1)} | self.decided

    def _of_model(self) -> Json:
        return {}


@dataclass(slots=True, kw_only=True)
class ModelStepReport(StepReport):
    """The report of a step that runs a model, with the model and its tokens.

    The answer's state refers to all reports for its usage, so a report that held the state would create a reference
    cycle.
    """

    prepared: PreparedRequest
    outputs: Sequence[ChoiceOutput]  # of all choices so far
    times: PipelineStepTimes | None  # None if requests are not traced

    def end(self, **decided: object) -> None:
        if self.ended_at is None and self.times is not None:
            self.times.end()
        StepReport.end(self, **decided)

    def _of_model(self) -> Json:
        return {
            "model": self.prepared.model.name,
            "prompt_tokens": self.prepared.num_prompt_tokens,
            "completion_tokens": sum(output.num_tokens for output in self.outputs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A checked body, and the results of the steps so far."""

    endpoint: Endpoint
    body: QueuedRequest
    context: RequestContext
    prepare: Callable[..., Awaitable[PreparedRequest]]  # checks a body for a model, and reserves the tokens it may need
    metrics: RequestMetrics
    size: int  # size of the body (see `size_of`)
    sources: Sequence[Json] | None = None  # sources of the documents in the body, if a step has chosen them
    is_judged: bool = False  # measure the confidence of the models that answer
    reports: list[StepReport] = field(default_factory=list)  # reports of all branches' steps, in order of their start
    way: tuple[StepReport, ...] = ()  # reports of the steps that have led to this run

    def behind(self, report: StepReport) -> PipelineRun:
        """Return this run after one more step, which has finished."""
        return replace(self, way=(*self.way, report))

    def judged(self) -> PipelineRun:
        """Return this run with `is_judged`, which measures the confidence of the models that answer."""
        return replace(self, is_judged=True)

    def with_documents(self, documents: Sequence[str], sources: Sequence[Json]) -> PipelineRun:
        """Return this run with new documents in its body. `sources` identify the documents for the client."""
        body = self.body.model_copy(update={"documents": list(documents)})
        size = self.size + sum(map(len, documents))
        return replace(self, body=body, size=size, sources=sources)

    @property
    def question(self) -> str:
        """The user's last text. Raises InvalidRequest if there is none."""
        assert isinstance(self.body, GenerationRequest), "pipelines are for endpoints that generate"
        return self.body.question

    async def answer(self, pipeline: OtherPipeline) -> PendingAnswer:
        """Run a pipeline up to the first token, and return the pending answer, whose usage lists the steps."""
        pending = await pipeline.answer(self)
        pending.state.extra_usage = partial(_usage_of, pipeline.name, self.reports)
        return pending

    async def prepared(
        self, target: Target, step: Step, *, known: PreparedRequest | None = None
    ) -> Callable[[], Awaitable[PendingAnswer]]:
        """Return a function that starts a target's answer. Checks a model's request and reserves its tokens beforehand.

        `known` is this request, if it was already checked without reserving its tokens.
        """
        if not isinstance(target, ServedModel):
            return partial(target.answer, self)
        prepared = await self.request_for(target, known=known)

        async def start() -> PendingAnswer:
            return self.generated(prepared, step)

        return start

    async def request_for(
        self, model: ServedModel, *, reserves: bool = True, known: PreparedRequest | None = None
    ) -> PreparedRequest:
        """Return the checked request for a model, and with `reserves`, reserve the tokens that it may need."""
        of_body = (self.endpoint, self.body, model, self.context, self.size)
        return await self.prepare(*of_body, reserves=reserves, known=known)

    async def request_aside(
        self, endpoint: Endpoint, model: ServedModel, *, question_param: str, **fields: object
    ) -> PreparedRequest:
        """Return the request of a step that does not answer, with the tenant, priority and deadline of the body.

        `fields` are checked values for the endpoint's body. An error in `question_param` names the client's own field.
        """
        body = self.body
        assert isinstance(body, GenerationRequest), "pipelines are for endpoints that generate"
        shared = {name: getattr(body, name) for name in QueuedRequest.model_fields}
        asked = endpoint.schema.model_construct(**{**shared, **fields})
        headers = {name: value for name, value in self.context.headers.items() if name not in _REPLICA_HEADERS}
        try:
            return await self.prepare(endpoint, asked, model, replace(self.context, headers=headers), self.size)
        except InvalidRequest as error:
            if error.param == question_param:
                error.param = body.prompt_param
            raise

    def note(self, step: Step, **decided: object) -> StepReport:
        """Add and return the report of a step that has made a decision without a model."""
        now = time.monotonic()
        self.reports.append(StepReport(step=step, began_at=now, ended_at=now, decided=dict(decided)))
        return self.reports[-1]

    def begin(self, prepared: PreparedRequest, step: Step) -> tuple[ResponseState, ModelStepReport]:
        """Start a step that runs a model, and return its response and its report.

        The key is charged even if the client does not see the output. Raises DeadlineMissed if no time is left.
        """
        trace, now = self.context.trace, time.monotonic()
        if self.reports:
            prepared = _with_less_time(prepared, now - self.reports[0].began_at)
        state = ResponseState.begin(prepared, self.context, self.metrics)
        state.trace = None  # a trace shows attempts only for the answer, not for other steps
        times = None if trace is None else trace.step(f"{step.kind} {step.name}", prepared.model.name)
        report = ModelStepReport(step=step, began_at=now, prepared=prepared, outputs=state.outputs, times=times)
        self.reports.append(report)
        return state, report

    def generated(self, prepared: PreparedRequest, step: Step) -> PendingAnswer:
        """Return a model's answer, whose generation starts when the answer is read."""
        confidence = None
        if self.is_judged:
            confidence = Confidence(prepared.model.generate)
            prepared = replace(prepared, model=replace(prepared.model, generate=confidence.generate))
        state, report = self.begin(prepared, step)
        if not self.is_judged:
            state.trace = self.context.trace
        return PendingAnswer(state=state, way=(*self.way, report), confidence=confidence)

    def again(self, answer: ReadAnswer) -> PendingAnswer:
        """Return an answer that replays `answer`, which was read completely. The metrics do not count it twice."""
        prepared = answer.of.state.prepared
        state = ResponseState.begin(prepared, self.context, RequestMetrics(), pieces=answer.deltas.replayed())
        return replace(answer.of, state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAnswer:
    """An answer whose generation starts when the answer is read."""

    state: ResponseState
    way: tuple[StepReport, ...]  # reports of the steps that have led to the answer; the last of these steps answers
    confidence: Confidence | None = None  # if the run is judged

    @property
    def report(self) -> StepReport:
        """The report of the step that answers."""
        return self.way[-1]

    async def read(self) -> ReadAnswer:
        """Wait for the whole answer. Raises the errors of its generation."""
        deltas = DeltaBuffer()
        await self.state.read(deltas.add, keep_text=True)
        self.report.end()
        return ReadAnswer(self, deltas)

    def behind(self, report: StepReport) -> PendingAnswer:
        """Return this answer with the report of an earlier step before its other reports."""
        return replace(self, way=(report, *self.way))

    def headers(self) -> dict[str, str]:
        """Return headers with the decisions of the steps on `way` that are known before the first token."""
        headers = {"x-carousel-pipeline-model": self.state.prepared.model.name}
        for report in self.way:
            if "mean_logprob" in report.decided:
                headers["x-carousel-pipeline-logprob"] = f"{report.decided['mean_logprob']:.4f}"
            if "case" in report.decided:
                headers["x-carousel-pipeline-case"] = str(report.decided["case"])
            if "kept" in report.decided:
                headers["x-carousel-pipeline-documents"] = _document_ids(report.decided["kept"])
        return headers


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A finished answer of a judged run."""

    of: PendingAnswer
    deltas: DeltaBuffer

    @property
    def mean_logprob(self) -> float:
        assert self.of.confidence is not None, "the run of a read answer is judged"
        return self.of.confidence.mean_logprob

    @property
    def texts(self) -> tuple[object, ...]:
        """The text and the calls of each choice. Answers with equal content have equal values."""
        outputs = self.of.state.outputs
        calls = [[{**call, "id": ""} for call in output.calls] for output in outputs]
        return tuple((str(output.text).strip(), str(called)) for output, called in zip(outputs, calls, strict=True))

    def decided(self, **decided: object) -> None:
        """Add the mean log-probability and a decision about this answer to its report."""
        self.of.report.decided |= {"mean_logprob": self.mean_logprob, **decided}


class Confidence:
    """Wraps a model's `generate`, and measures the mean log-probability of all tokens that it generates."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._sum = 0.0
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """The mean so far. If nothing was generated, the mean is 0, which means certainty."""
        return self._sum / self._num_tokens if self._num_tokens else 0.0

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """Call the model's `generate`, with log-probabilities even if the request asks for none."""
        if request.sampling.logprobs is None:
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        deltas = self._generate(request)
        try:
            async for delta in deltas:
                self._sum += sum([max(each.logprob, LEAST_LOGPROB) for each in delta.logprobs])
                self._num_tokens += len(delta.logprobs)
                yield delta
        finally:
            await close(deltas)


def _usage_of(name: str, reports: Iterable[StepReport]) -> MoreUsage:
    return {"pipeline": {"name": name, "steps": [report.as_json() for report in reports]}}


def _document_ids(kept: Sequence[Json]) -> str:
    """Return the ids or indexes of documents for a header. Proxies limit headers, so the last ids may be missing."""
    ids, room = list[str](), MAX_DOCUMENTS_HEADER
    for document in kept:
        written = quote(str(document.get("id", document["index"])), safe=_PLAIN)
        room -= len(written) + 1
        if room < 0:
            break
        ids.append(written)
    return ",".join(ids)


def _with_less_time(prepared: PreparedRequest, elapsed_s: float) -> PreparedRequest:
    """Return the request with its deadlines shortened by `elapsed_s`. Raises DeadlineMissed if no time is left."""
    deadlines = [request.deadline_s for request in prepared.requests if request.deadline_s is not None]
    if not deadlines:
        return prepared
    if min(deadlines) <= elapsed_s:
        raise DeadlineMissed(
            f"the deadline of {min(deadlines):g} s passed while the steps before {prepared.model.name} were running"
        )
    return replace(
        prepared,
        requests=tuple(
            replace(request, deadline_s=None if request.deadline_s is None else request.deadline_s - elapsed_s)
            for request in prepared.requests
        ),
    )
