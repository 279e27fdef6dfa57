"""Steps before the answer: the documents that fit the request's last text best are kept, as `/v1/rerank` ranks them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.api.call import Call, ServedModel
from app.api.endpoints.ranking import best_documents
from app.api.endpoints.table import ENDPOINTS
from app.api.http.headers import GROUP_HEADER, PRESET_HEADER
from app.api.output.choices import generate_choices
from app.api.pipelines.run import PipelineRun
from app.api.schemas.ranking import RerankRequest
from app.api.schemas.requests import GenerationRequest, QueuedRequest
from app.errors import InvalidRequest

_RERANK = ENDPOINTS["/v1/rerank"]
_OF_THE_ANSWER = (GROUP_HEADER, PRESET_HEADER)  # which replicas of the model that answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankStep:
    """Keeps the best documents of the request, by the scores of a model."""

    name: str
    model: ServedModel
    top_n: int
    kind: str = "rerank"

    async def ranked(self, run: PipelineRun) -> PipelineRun:
        """The run with the documents that are kept, the best first. Raises InvalidRequest where there are none."""
        body = run.body
        assert isinstance(body, GenerationRequest), "pipelines are for endpoints that generate"
        if not body.documents:
            raise InvalidRequest(f"documents is required: {body.model} ranks them; send texts", param="documents")
        asked = self._request(body)
        progress = run.begin(await self._call(run, asked, body.prompt_param), self)
        best = await best_documents(asked, progress, generate_choices(progress.call))
        numbers = [index if run.numbers is None else run.numbers[index] for index, _ in best]
        kept = [{"index": number, "score": score} for number, (_, score) in zip(numbers, best, strict=True)]
        run.reports[-1].end(kept=kept)
        return run.with_documents([body.documents[index] for index, _ in best], numbers)

    def _request(self, body: GenerationRequest) -> RerankRequest:
        """What a client would ask of /v1/rerank. All of it is checked already, and too long documents are cut."""
        return RerankRequest.model_construct(
            **{name: getattr(body, name) for name in QueuedRequest.model_fields},
            query=body.question,
            documents=body.documents,
            top_n=self.top_n,
            max_tokens_per_doc=self.model.facts.max_model_len,
            return_documents=False,
        )

    async def _call(self, run: PipelineRun, asked: RerankRequest, prompt_param: str) -> Call:
        headers = {name: value for name, value in run.client.headers.items() if name not in _OF_THE_ANSWER}
        try:
            return await run.prepare(_RERANK, asked, self.model, replace(run.client, headers=headers), run.size)
        except InvalidRequest as error:
            if error.param == "query":  # the client has sent it under another name
                error.param = prompt_param
            raise
