"""Files and batches: kept in SQLite and a folder, worked off through whoever answers a line. No HTTP, no Ray here."""

from app.jobs.job import Batch, LineError, Status, StoredFile
from app.jobs.line import Answer, Answered, InputLine, Json, LineResult, failed_line, result_of
from app.jobs.local_service import LocalBatchService
from app.jobs.service import BatchService, NewBatch, NewFile, NewWebhook, PageOf
from app.jobs.worker import BatchWork, BatchWorker

__all__ = [
    "Answer",
    "Answered",
    "Batch",
    "BatchService",
    "BatchWork",
    "BatchWorker",
    "InputLine",
    "Json",
    "LineError",
    "LineResult",
    "LocalBatchService",
    "NewBatch",
    "NewFile",
    "NewWebhook",
    "PageOf",
    "Status",
    "StoredFile",
    "failed_line",
    "result_of",
]
