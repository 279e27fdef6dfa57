"""What clients may ask for as `model`: models, their aliases and adapters, pipelines."""

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
    """Everything that is served, by its names."""

    def __init__(self, models: Sequence[ServedModel], pipelines: Iterable[Pipeline] = ()) -> None:
        """`pipelines` are of these models."""
        self._bases = tuple(models)
        self.models = by_any_name(models)  # and adapters, see `serve_adapters`
        self.pipelines = {pipeline.name: pipeline for pipeline in pipelines}

    def serve_adapters(self, model: str, adapters: Iterable[Adapter]) -> None:
        """From now on these adapters of a model are served under their names, and no others of it.

        An adapter that was served before keeps its entry.
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
        """The model of this name or alias for this account; without a name the only one.

        Raises InvalidRequest, NotFound, NotPermitted.
        """
        if name is not None and name in self.models:
            model = self.models[name]
            account.check_model(model.base)
            return model
        usable = {model.name: model for model in self._bases if account.may_use(model.name)}
        if name is None and len(usable) == 1:
            return next(iter(usable.values()))
        served = ", ".join(usable)
        if name is None:
            raise InvalidRequest(f"model is required: this server has {served}", param="model")
        raise NotFound(
            f"there is no model {name[:100]!r}; this server has {served}", param="model", code="model_not_found"
        )

    def current(self, model: ServedModel) -> ServedModel:
        """An adapter, also of a pipeline, as it is served now: it is found by its name. Raises NotFound."""
        served = self.models.get(model.name)
        if served is None or served.parent != model.parent:
            raise NotFound(
                f"the adapter {model.name!r} of {model.parent} is not served now; ask for another model",
                param="model",
                code="model_not_found",
            )
        return served

    def answering(self, body: QueuedRequest, account: Account) -> ServedModel | Pipeline:
        """What answers a body. Raises InvalidRequest, NotFound, NotPermitted."""
        pipeline = self.pipelines.get(body.model or "") if isinstance(body, GenerationRequest) else None
        if pipeline is None:
            return self.model(body.model, account)
        pipeline.check_account(account)
        return pipeline

    def entries(self, account: Account) -> list[Json]:
        """All that the account may use, as /v1/models lists it."""
        models = [model.entry(name) for name, model in self.models.items() if account.may_use(model.base)]
        return models + [each.entry() for each in self.pipelines.values() if each.is_for(account)]

    def entry(self, name: str, account: Account) -> Json:
        """The entry of one of these. Raises NotFound, NotPermitted."""
        pipeline = self.pipelines.get(name)
        if pipeline is not None and pipeline.is_for(account):
            return pipeline.entry()
        return self.model(name, account).entry(name)
