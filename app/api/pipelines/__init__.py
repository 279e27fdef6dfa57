"""Pipelines: several steps under one model name. Earlier steps choose documents, and the last step answers."""

from app.api.pipelines.pipeline import Pipeline, fill_indexes, pipelines_of
from app.api.pipelines.run import PendingAnswer, PipelineRun

__all__ = ["PendingAnswer", "Pipeline", "PipelineRun", "fill_indexes", "pipelines_of"]
