"""What the set-up of `make` says while pip works, by lines of pip and by pip itself."""

from __future__ import annotations

import pytest

from scripts.install import main, step_in

COLLECTING = "Collecting torch==2.13.0 (from -c constraints.txt (line 12))\n"
DOWNLOADING = "  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (181.5 MB)\n"
INSTALLING = "Installing collected packages: mpmath, torch, carousel\n"


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ([], "starting pip"),
        (["Processing ./.\n"], "starting pip"),
        ([COLLECTING], "downloading torch==2.13.0"),
        ([COLLECTING, DOWNLOADING], "downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (181.5 MB)"),
        ([COLLECTING, DOWNLOADING, "Requirement already satisfied: pip\n", INSTALLING], "installing 3 packages"),
    ],
)
def test_the_line_says_the_step_of_pip(printed: list[str], said: str) -> None:
    assert step_in(printed, has_names=True) == said
    assert step_in(printed, has_names=False) == said.partition(" torch")[0]


def test_what_pip_prints_is_shown_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-index", "there-is-no-such-package"]) == 1
    told = capsys.readouterr()
    assert "No matching distribution found for there-is-no-such-package" in told.err
    assert "installed" not in told.out


def test_the_end_is_said_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-index", "pip"]) == 0
    told = capsys.readouterr()
    assert "packages: installed after" in told.out
    assert told.err == ""
