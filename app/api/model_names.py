"""The names that clients may send as `model`: models, their aliases and adapters, and pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.api.auth.limits import Account
from app.api.pipelines import Pipeline
from app.api.prepared_request import ServedModel, by_any_name
from app.api.schemas.requests import GenerationRequest, QueuedRequest
from app.engine.request import Adapter
from app.errors import InvalidRequest, NotFound
from app.json_pieces import Json


class ModelNames:
    """All models, adapters and pipelines that are served, by name."""

    def __init__(self, models: Sequence[ServedModel], pipelines: Iterable[Pipeline] = ()) -> None:
        """`pipelines` must use only these models."""
        self._bases = tuple(models)
        self.models = by_any_name(models)  # `serve_adapters` adds adapters
        self.pipelines = {pipeline.name: pipeline for pipeline in pipelines}

    def serve_adapters(self, model: str, adapters: Iterable[Adapter]) -> None:
        """Serve exactly these adapters of a model, under their names. Other adapters of the model are no longer served.

        An adapter that was served before retains its /v1/models entry.
        """
        base = next(each for each in self._bases if each.name == model)
        served = {name: each for name, each in self.models.items() if each.parent != model}
        for adapter in adapters:
            known = self.models.get(adapter.name)
            if known is None or known.adapter != adapter:
                known = base.adapted(adapter)
            served.setdefault(adapter.name, known)
        self.models = served

    def model(self, name: str | None, account: Account) -> ServedModel:
        """Return the model with this name or alias. Without a name, return the only model that the account may use.

        Raises InvalidRequest if a name is required, NotFound, and NotPermitted if the account may not use the model.
        """
        if name is not None and name in self.models:
            model = self.models[name]
            account.check_model(model.base)
            return model
        usable = {each.name: each for each in self._bases if account.may_use(each.name)}
        if name is None and len(usable) == 1:
            return next(iter(usable.values()))
        served = ", ".join(usable)
        if name is None:
            raise InvalidRequest(f"`model` is required; this server has {served}", param="model")
        raise NotFound(
            f"there is no model {name[:100]!r}; this server has {served}", param="model", code="model_not_found"
        )

    def current(self, model: ServedModel) -> ServedModel:
        """Return the adapter that is currently served under this adapter's name. Raises NotFound if there is none."""
        served = self.models.get(model.name)
        if served is None or served.parent != model.parent:
            raise NotFound(
                f"the adapter {model.name!r} of {model.parent} is no longer served; choose another model",
                param="model",
                code="model_not_found",
            )
        return served

    def answering(self, body: QueuedRequest, account: Account) -> ServedModel | Pipeline:
        """Return the model or pipeline that answers a body. Raises InvalidRequest, NotFound, NotPermitted."""
        pipeline = self.pipelines.get(body.model or "") if isinstance(body, GenerationRequest) else None
        if pipeline is None:
            return self.model(body.model, account)
        pipeline.check_account(account)
        return pipeline

    def entries(self, account: Account) -> list[Json]:
        """Return the /v1/models entries of all models and pipelines that the account may use."""
        models = [model.entry(name) for name, model in self.models.items() if account.may_use(model.base)]
        return models + [each.entry() for each in self.pipelines.values() if each.is_for(account)]

    def entry(self, name: str, account: Account) -> Json:
        """Return the /v1/models entry of one model or pipeline. Raises NotFound, NotPermitted."""
        pipeline = self.pipelines.get(name)
        if pipeline is not None and pipeline.is_for(account):
            return pipeline.entry()
        return self.model(name, account).entry(name)
