"""Write Grafana boards, and Prometheus rules and alerts, to this package's folder or another folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from deployments.dashboards.boards import BOARDS
from deployments.dashboards.rules import rules

FOLDER = Path(__file__).parent


def files() -> dict[str, str]:
    """Return the contents of all files by name."""
    boards = {f"{board.name}.json": json.dumps(board.as_json(), indent=1) + "\n" for board in BOARDS}
    return boards | {
        "rules.yaml": "# Written by python -m deployments.dashboards\n"
        + yaml.safe_dump(rules(), sort_keys=False, width=120)
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.dashboards", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the files (default: this package)")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
