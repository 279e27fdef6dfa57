"""Finds documents of a file by the similarity of their embeddings, which are computed once and stored on disk."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.api.output.readouts import Vector
from app.api.pipelines.run import PipelineRun
from app.api.pipelines.vectors import Matrix, cosines, question_vector, service_vectors
from app.api.prepared_request import ServedModel
from app.api.schemas.fields import MAX_ID_LENGTH
from app.api.schemas.requests import GenerationRequest
from app.disk import cache_folder, take_lock, write_atomically
from app.errors import InvalidRequest, InvalidSetup, Unavailable
from app.json_pieces import Json

logger = logging.getLogger(__name__)

MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_INDEX_DOCUMENTS = 20_000
# Vectors of the same text from the same weights have at least this cosine, even in different batches and in bfloat16.
_SAME = 0.9995
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class IndexedDocument:
    """One document of an index file."""

    text: str
    source: Json  # identifies the document for clients: its index, and its id if it has one


class DocumentIndex:
    """The documents of a file and their vectors."""

    def __init__(self, path: str, documents: Sequence[IndexedDocument], model: ServedModel) -> None:
        self._path = path
        self._model = model
        self.documents = documents
        self._matrix: Matrix | None = None  # [num_documents, embedding_size], each row of length 1
        self._num_computed = 0
        self._lock = asyncio.Lock()

    async def best(self, question: Vector, top_n: int) -> list[tuple[IndexedDocument, float]]:
        """Return the documents with the highest cosines, highest first. Raises Unavailable until the vectors exist."""
        if self._matrix is None and self._lock.locked():
            raise Unavailable(
                f"the vectors of {Path(self._path).name} are being computed, and only {self._num_computed:,} of "
                f"{len(self.documents):,} are ready; try again later"
            )
        scores = await cosines(await self.matrix(), question)
        order = np.argsort(-scores, kind="stable")[:top_n]
        return [(self.documents[at], float(scores[at])) for at in order.tolist()]

    async def matrix(self) -> Matrix:
        """Return the stored vectors if the model still computes the same vectors, or compute and store new vectors.

        If several processes need the vectors, one process computes them and the others wait.
        """
        async with self._lock:
            if self._matrix is None:
                path = await asyncio.to_thread(self._place)
                while (lock := take_lock(path.with_suffix(".lock"))) is None:  # noqa: ASYNC110 - another process has it
                    await asyncio.sleep(1.0)
                try:
                    matrix = await self._stored(path)
                    self._matrix = await self._computed(path) if matrix is None else matrix
                finally:
                    os.close(lock)
        return self._matrix

    def _place(self) -> Path:
        """Return the path of the stored vectors. The file name is a digest of the documents and the model info."""
        folder = cache_folder() / "indexes"
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(f"{self._model.name}\n{self._model.pooling}\n{self._model.model_info}\n".encode())
        for document in self.documents:
            digest.update(f"{len(document.text)}\n{document.text}".encode())
        return folder / f"{digest.hexdigest()[:32]}.npy"

    async def _stored(self, path: Path) -> Matrix | None:
        """Return the stored vectors, or None if there are none or the model's weights have changed since."""
        try:
            matrix: Matrix = await asyncio.to_thread(np.load, path, allow_pickle=False)
        except (OSError, ValueError):  # the file is missing or broken
            return None
        some = sorted({0, len(self.documents) // 2, len(self.documents) - 1})
        vectors = await service_vectors([self.documents[at].text for at in some], self._model, is_background=True)
        if matrix.shape != (len(self.documents), len(vectors[0])):
            return None
        if min(float(matrix[at] @ each) for at, each in zip(some, vectors, strict=True)) < _SAME:
            logger.info("index %s: the weights of %s have changed; computing new vectors", self._path, self._model.name)
            return None
        return matrix

    async def _computed(self, path: Path) -> Matrix:
        def note(number: int) -> None:
            self._num_computed = number

        texts = [document.text for document in self.documents]
        vectors = await service_vectors(texts, self._model, is_background=True, on_progress=note)
        matrix: Matrix = await asyncio.to_thread(np.stack, vectors)
        await asyncio.to_thread(_write, path, matrix)
        logger.info("index %s: %d vectors have been computed by %s", self._path, len(texts), self._model.name)
        return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStep:
    """Adds the best documents of an index to the request."""

    name: str
    model: ServedModel
    top_n: int
    index: DocumentIndex
    kind: str = "embed"

    async def ranked(self, run: PipelineRun) -> PipelineRun:
        """Return the run with the documents that were found, best first.

        Raises InvalidRequest if the request has its own documents, and Unavailable until the index has vectors.
        """
        body = run.body
        assert isinstance(body, GenerationRequest), "pipelines are for endpoints that generate"
        if body.documents:
            raise InvalidRequest(
                f"{body.model} reads its documents from an index; leave out `documents`", param="documents"
            )
        question, report = await question_vector(run, self.model, self)
        best = await self.index.best(question, self.top_n)
        report.end(kept=[document.source | {"score": score} for document, score in best])
        return run.behind(report).with_documents(
            [document.text for document, _ in best], [document.source for document, _ in best]
        )


def read_index(path: str) -> list[IndexedDocument]:
    """Read the documents of a file. Raises InvalidSetup, which names the invalid line."""
    file = Path(path).expanduser()
    try:
        num_bytes = file.stat().st_size
        if num_bytes > MAX_INDEX_BYTES:
            raise InvalidSetup(f"{path} has {num_bytes:,} bytes; an index may have at most {MAX_INDEX_BYTES:,}")
        documents = list(_documents(path, file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetup(f"{path} cannot be read: {error}") from error
    if not 0 < len(documents) <= MAX_INDEX_DOCUMENTS:
        raise InvalidSetup(f"{path} has {len(documents):,} documents; an index must have 1 to {MAX_INDEX_DOCUMENTS:,}")
    return documents


def _write(path: Path, matrix: Matrix) -> None:
    written = io.BytesIO()
    np.save(written, matrix, allow_pickle=False)
    write_atomically(path, written.getvalue())


def _documents(path: str, content: str) -> Iterator[IndexedDocument]:
    lines = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
    for index, (number, line) in enumerate(lines):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidSetup(f"{path}:{number} is not valid JSON: {error}") from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InvalidSetup(f'{path}:{number} must be an object with a text, such as {{"text": "...", "id": "..."}}')
        given_id = value.get("id")
        if not isinstance(given_id, str | int | None):
            raise InvalidSetup(f"{path}:{number} has an id that is neither a string nor an integer")
        if len(str(given_id)) > MAX_ID_LENGTH:
            raise InvalidSetup(
                f"{path}:{number} has an id of {len(str(given_id)):,} characters; at most {MAX_ID_LENGTH} are accepted"
            )
        if _HALF_OF_A_PAIR.search(f"{text}{given_id}"):
            raise InvalidSetup(f"{path}:{number} contains half of a surrogate pair, which is not a character")
        yield IndexedDocument(text, {"index": index} | ({} if given_id is None else {"id": given_id}))
