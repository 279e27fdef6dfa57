"""Offline work: batches of a service and bulk runs, each item answered once. No HTTP routes and no Ray here.

This is what the API's routes need; request handling is not imported from this room.
"""

from app.jobs.job import LOWEST_CLASS, Answer, Answered, Item, ItemError, ItemOrigin, Job, JobState, Json, StoredFile
from app.jobs.service import BatchLimits, BatchService, NewBatch, NewFile, PageOf

__all__ = [
    "LOWEST_CLASS",
    "Answer",
    "Answered",
    "BatchLimits",
    "BatchService",
    "Item",
    "ItemError",
    "ItemOrigin",
    "Job",
    "JobState",
    "Json",
    "NewBatch",
    "NewFile",
    "PageOf",
    "StoredFile",
]
