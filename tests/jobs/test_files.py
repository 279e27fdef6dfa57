"""Files on disk: whole or not at all, under our own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import InvalidSetup
from app.jobs.files import FileStore


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_draft_becomes_a_file_or_nothing(tmp_path: Path) -> None:
    folder = FileStore(tmp_path)
    with folder.draft() as kept, folder.draft() as dropped:
        for draft in (kept, dropped):
            draft.write(b"abc")
        kept.keep()
    assert folder.read(kept.id, 0, 9) == b"abc"
    assert names(tmp_path) == {kept.id}


def test_a_sweep_leaves_what_is_known(tmp_path: Path) -> None:
    folder = FileStore(tmp_path)
    ids = []
    for _ in range(3):
        draft = folder.draft()
        draft.keep()
        ids.append(draft.id)
    (tmp_path / "drafts" / "left-by-a-crash").touch()
    folder.sweep(lambda: ids[:1])
    assert names(tmp_path) == {ids[0]}


def test_a_sweep_removes_nothing_that_another_process_has_begun_meanwhile(tmp_path: Path) -> None:
    folder = FileStore(tmp_path)
    begun = []

    def known() -> list[str]:
        begun.extend(folder.draft() for _ in range(2))
        begun[0].keep()
        return []

    folder.sweep(known)
    begun[1].keep()
    assert names(tmp_path) == {draft.id for draft in begun}


def test_no_other_user_of_the_machine_may_look_into_it(tmp_path: Path) -> None:
    FileStore(tmp_path / "new")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*")} == {0o700}


def test_a_folder_whose_files_are_behind_a_url_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "files-name").write_text("carousel-1")
    with pytest.raises(
        InvalidSetup, match=r"below carousel-1/; .*; copy the files to that folder, and then delete .*files-name"
    ):
        FileStore(tmp_path)
