"""One request on its way through the steps of a pipeline: what each computes, what time is left, what it reports."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from urllib.parse import quote

from app.api.endpoints.table import Endpoint
from app.api.output.choices import KeptDeltas, token_deltas
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

MAX_DOCUMENTS_HEADER = 4096  # characters of the ids of documents in a header
_PLAIN = " !#$&'()*+-./:;=?@[]^_`{|}~"  # beside letters and digits, what an id has there as it is

_REPLICA_HEADERS = (GROUP_HEADER, PRESET_HEADER)  # which replicas of the model that answers


class Step(Protocol):
    """One step of a pipeline."""

    @property
    def name(self) -> str:
        """The pipeline's and the place in it, as `rag[0]`."""

    @property
    def kind(self) -> str:
        """As in the config."""


class OtherPipeline(Protocol):
    """A pipeline as the steps that name it see it."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> Sequence[ServedModel]:
        """All models that may run, each once."""

    @property
    def answering_models(self) -> Sequence[ServedModel]:
        """Those that may answer, each once."""

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run all steps that come before the first token of the answer."""


Target = ServedModel | OtherPipeline  # what a step may name as what answers


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What one step has done: its time, its decision."""

    step: Step
    began_at: float  # by the monotonic clock
    ended_at: float | None = None
    decided: Json = field(default_factory=dict)

    def end(self, **decided: object) -> None:
        """The step has its result."""
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
    """The same with the model that ran, and its tokens."""

    state: ResponseState
    times: PipelineStepTimes | None  # where traces are sent

    def end(self, **decided: object) -> None:
        if self.ended_at is None and self.times is not None:
            self.times.end()
        StepReport.end(self, **decided)

    def _of_model(self) -> Json:
        return {
            "model": self.state.prepared.model.name,
            "prompt_tokens": self.state.prepared.num_prompt_tokens,
            "completion_tokens": sum(output.num_tokens for output in self.state.outputs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A checked body, and what has become of it by now."""

    endpoint: Endpoint
    body: QueuedRequest
    context: RequestContext
    prepare: Callable[..., Awaitable[PreparedRequest]]  # checks a body for a model, and reserves what it may need
    metrics: RequestMetrics
    size: int  # of the body, see `size_of`
    sources: Sequence[Json] | None = None  # of the documents in the body, where a step has chosen them
    is_judged: bool = False  # it is of interest how sure a model is of its answer
    reports: list[StepReport] = field(default_factory=list)  # of all branches, in the order in which they began
    way: tuple[StepReport, ...] = ()  # those that have led here

    def behind(self, report: StepReport) -> PipelineRun:
        """The same run after one more step, which has its result."""
        return replace(self, way=(*self.way, report))

    def judged(self) -> PipelineRun:
        """The same run, of which it is of interest how sure models are of their answers."""
        return replace(self, is_judged=True)

    def with_documents(self, documents: Sequence[str], sources: Sequence[Json]) -> PipelineRun:
        """The same run with other documents in its body; `sources`: of each, what the client knows it by."""
        body = self.body.model_copy(update={"documents": list(documents)})
        size = self.size + sum(map(len, documents))
        return replace(self, body=body, size=size, sources=sources)

    def with_preset(self, preset: str) -> PipelineRun:
        """The same run for replicas with this preset, unless the client has chosen some."""
        headers = self.context.headers
        if any(headers.get(name) for name in _REPLICA_HEADERS):
            return self
        return replace(self, context=replace(self.context, headers={**headers, PRESET_HEADER: preset}))

    @property
    def question(self) -> str:
        """The last text of the user. Raises InvalidRequest where there is none."""
        assert isinstance(self.body, GenerationRequest), "pipelines are for endpoints that generate"
        return self.body.question

    async def answer(self, pipeline: OtherPipeline) -> PendingAnswer:
        """The answer of a pipeline, with all done that must be done before its first token."""
        pending = await pipeline.answer(self)
        pending.state.extra_usage = partial(self._usage, pipeline.name)
        return pending

    async def prepared(
        self, target: Target, step: Step, *, known: PreparedRequest | None = None
    ) -> Callable[[], Awaitable[PendingAnswer]]:
        """A function that starts an answer. What a model computes is checked and reserved before, so at once.

        known: what the body asks of a model, where it was checked before and not reserved.
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
        """What the body asks of a model, checked, and what it may need reserved."""
        of_body = (self.endpoint, self.body, model, self.context, self.size)
        return await self.prepare(*of_body, reserves=reserves, known=known)

    async def request_aside(
        self, endpoint: Endpoint, model: ServedModel, *, question_param: str, **fields: object
    ) -> PreparedRequest:
        """What a step asks that does not answer, for the same tenant, in the same class, with the same deadline.

        `fields` are checked values of the endpoint's body. An error about `question_param` names the client's field.
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
        """A step has decided something without a model."""
        now = time.monotonic()
        self.reports.append(StepReport(step=step, began_at=now, ended_at=now, decided=dict(decided)))
        return self.reports[-1]

    def begin(self, prepared: PreparedRequest, step: Step) -> ModelStepReport:
        """A step begins now, with the time that the steps before have left; the report has its response.

        What it uses counts for the key, whether its output is shown or not. Raises DeadlineMissed.
        """
        trace, now = self.context.trace, time.monotonic()
        if self.reports:
            prepared = _with_less_time(prepared, now - self.reports[0].began_at)
        state = ResponseState.begin(prepared, self.context, self.metrics)
        state.trace = None  # of all that is computed, the trace has the attempts at the answer
        times = None if trace is None else trace.step(f"{step.kind} {step.name}", prepared.model.name)
        report = ModelStepReport(step=step, began_at=now, state=state, times=times)
        self.reports.append(report)
        return report

    def generated(self, prepared: PreparedRequest, step: Step) -> PendingAnswer:
        """The output of a model, which begins when it is read."""
        confidence = None
        if self.is_judged:
            confidence = Confidence(prepared.model.generate)
            prepared = replace(prepared, model=replace(prepared.model, generate=confidence.generate))
        report = self.begin(prepared, step)
        if not self.is_judged:
            report.state.trace = self.context.trace
        return PendingAnswer(state=report.state, way=(*self.way, report), confidence=confidence)

    def again(self, answer: ReadAnswer) -> PendingAnswer:
        """An answer that was read, once more. It was measured when it was generated."""
        prepared = answer.of.state.prepared
        state = ResponseState.begin(prepared, self.context, RequestMetrics(), pieces=answer.deltas.replayed())
        return replace(answer.of, state=state)

    def _usage(self, name: str) -> Json:
        return {"pipeline": {"name": name, "steps": [report.as_json() for report in self.reports]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAnswer:
    """An answer that begins when it is read."""

    state: ResponseState
    way: tuple[StepReport, ...]  # the steps that have led to it, and last the one that gives it
    confidence: Confidence | None = None  # where the run is judged

    @property
    def report(self) -> StepReport:
        """Of the step that gives it."""
        return self.way[-1]

    async def read(self) -> ReadAnswer:
        """Wait for all of it. Raises what its generation raises."""
        deltas = KeptDeltas()
        await self.state.read(deltas.add, keep_text=True)
        self.report.end()
        return ReadAnswer(self, deltas)

    def behind(self, report: StepReport) -> PendingAnswer:
        """The same answer after one more step before the others."""
        return replace(self, way=(report, *self.way))

    def headers(self) -> dict[str, str]:
        """What the steps on its way have decided, as far as it is known before the first token."""
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
    """An answer of a judged run that has ended."""

    of: PendingAnswer
    deltas: KeptDeltas

    @property
    def mean_logprob(self) -> float:
        assert self.of.confidence is not None, "its run is judged"
        return self.of.confidence.mean_logprob

    @property
    def texts(self) -> tuple[object, ...]:
        """Of each choice, what it says and calls; equal for answers that say the same."""
        outputs = self.of.state.outputs
        calls = [[{**call, "id": ""} for call in output.calls] for output in outputs]
        return tuple((str(output.text).strip(), str(called)) for output, called in zip(outputs, calls, strict=True))

    def decided(self, **decided: object) -> None:
        """Note what has come of it."""
        self.of.report.decided |= {"mean_logprob": self.mean_logprob, **decided}


class Confidence:
    """The mean log-probability of what a model generates, over all requests that go through here."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._sum = 0.0
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """0, which means certain, for a model that generated nothing."""
        return self._sum / self._num_tokens if self._num_tokens else 0.0

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The model's `generate`, with log-probabilities even if the request asks for none."""
        if request.sampling.logprobs is None:
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        async with token_deltas(self._generate, request) as deltas:
            async for delta in deltas:
                self._sum += sum([max(each.logprob, LEAST_LOGPROB) for each in delta.logprobs])
                self._num_tokens += len(delta.logprobs)
                yield delta


def _document_ids(kept: Sequence[Json]) -> str:
    """Ids or numbers of documents as one header, percent-encoded, so many as fit: proxies take some kilobytes."""
    ids, room = list[str](), MAX_DOCUMENTS_HEADER
    for document in kept:
        written = quote(str(document.get("id", document["index"])), safe=_PLAIN)
        room -= len(written) + 1
        if room < 0:
            break
        ids.append(written)
    return ",".join(ids)


def _with_less_time(prepared: PreparedRequest, elapsed_s: float) -> PreparedRequest:
    """The call with its deadlines shortened by `elapsed_s`. Raises DeadlineMissed when no time is left."""
    deadlines = [request.deadline_s for request in prepared.requests if request.deadline_s is not None]
    if not deadlines:
        return prepared
    if min(deadlines) <= elapsed_s:
        raise DeadlineMissed(
            f"the deadline of {min(deadlines):g} s has passed while the steps before {prepared.model.name} ran"
        )
    return replace(
        prepared,
        requests=tuple(
            replace(request, deadline_s=None if request.deadline_s is None else request.deadline_s - elapsed_s)
            for request in prepared.requests
        ),
    )
