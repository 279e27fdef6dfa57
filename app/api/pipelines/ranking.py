"""Steps before the answer: they keep the documents that fit the last text of the user best."""

from __future__ import annotations

from dataclasses import dataclass

from app.api.endpoints.ranking import best_documents
from app.api.endpoints.table import ENDPOINTS
from app.api.pipelines.run import PipelineRun
from app.api.prepared_request import ServedModel
from app.api.schemas.requests import GenerationRequest
from app.errors import InvalidRequest

_RERANK = ENDPOINTS["/v1/rerank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankStep:
    """Keeps the best documents of the request, by the scores of a model."""

    name: str
    kind: str
    model: ServedModel
    top_n: int

    async def ranked(self, run: PipelineRun) -> PipelineRun:
        """The run with the documents that are kept, the best first. Raises InvalidRequest where there are none."""
        body = run.body
        assert isinstance(body, GenerationRequest), "pipelines are for endpoints that generate"
        documents = body.documents
        if not documents:
            raise InvalidRequest(f"documents is required: {body.model} ranks them; send texts", param="documents")
        prepared = await run.request_aside(
            _RERANK,
            self.model,
            question_param="query",
            query=run.question,
            documents=documents,
            top_n=self.top_n,
            max_tokens_per_doc=self.model.facts.max_model_len,  # a longer one is cut
        )
        state = run.begin(prepared, self)
        best = await best_documents(len(documents), self.top_n, state)
        sources = run.sources or [{"index": index} for index in range(len(documents))]
        kept = [sources[index] for index, _ in best]
        run.reports[-1].end(kept=[{**source, "score": score} for source, (_, score) in zip(kept, best, strict=True)])
        return run.with_documents([documents[index] for index, _ in best], kept)
