"""The root of the settings: the models, API, pipelines and batches of one Serve application."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from app.config.api import ApiConfig
from app.config.base import Settings
from app.config.batches import BatchesConfig
from app.config.checks import check_branches
from app.config.models import ServedModelConfig
from app.config.pipelines import PipelineConfig
from app.config.removed import without_removed


class IngressConfig(Settings):
    """The processes that serve HTTP."""

    num_replicas: int = Field(1, ge=1, le=256, description="number of ingress processes")


class ApplicationConfig(Settings):
    """The `args` of the Serve application, as in `deployments/serve.yaml`."""

    models: tuple[ServedModelConfig, ...] = Field((ServedModelConfig(),), min_length=1, description="models to serve")
    api: ApiConfig = ApiConfig()
    ingress: IngressConfig = IngressConfig()
    pipelines: tuple[PipelineConfig, ...] = Field((), max_length=64, description="steps that clients call as one model")
    batches: BatchesConfig | None = Field(
        None, description="enables files, batches and /v1/batch; `{}` enables them with the defaults below"
    )

    @property
    def max_items_in_flight(self) -> int:
        """The maximum number of batch items on the replicas: half of all slots, to leave room for other requests."""
        least, most = 32, 1024
        num_slots = sum(model.replicas.max_replicas * model.engine.scheduler.max_running for model in self.models)
        return min(max(least, num_slots // 2), most)

    @model_validator(mode="before")
    @classmethod
    def _has_no_removed_settings(cls, given: Any) -> Any:
        return without_removed(given)

    @model_validator(mode="after")
    def _branches_agree(self) -> ApplicationConfig:
        check_branches(self.models, self.pipelines)
        if self.api.store_responses and self.batches is None:
            raise ValueError("api.store_responses requires `batches`; set `batches`, or remove api.store_responses")
        return self
