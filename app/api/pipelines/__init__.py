"""Several steps under one name: the last one answers, those before it choose what the answer is based on."""

from app.api.pipelines.pipeline import Pipeline, fill_indexes, pipelines_of
from app.api.pipelines.run import PendingAnswer, PipelineRun

__all__ = ["PendingAnswer", "Pipeline", "PipelineRun", "fill_indexes", "pipelines_of"]
