"""Several steps under one name: the last step answers, and the earlier steps choose the documents for the answer."""

from app.api.pipelines.pipeline import Pipeline, fill_indexes, pipelines_of
from app.api.pipelines.run import PendingAnswer, PipelineRun

__all__ = ["PendingAnswer", "Pipeline", "PipelineRun", "fill_indexes", "pipelines_of"]
