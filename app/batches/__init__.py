"""Files and batches: kept in SQLite and a folder, worked off through whoever answers a line. No HTTP, no Ray here."""

from app.batches.line import Answer, Answered, InputLine, Json, LineResult
from app.batches.local_service import LocalBatchService
from app.batches.objects import Batch, LineError, Status, StoredFile
from app.batches.service import BatchService, NewBatch, NewFile, NewWebhook, PageOf

__all__ = [
    "Answer",
    "Answered",
    "Batch",
    "BatchService",
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
]
