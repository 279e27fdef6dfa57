"""Print the rows that `make bulk` answers: `python -m scripts.bulk_example > deployments/bulk/example.jsonl`."""

from __future__ import annotations

import json

from scripts.demo_tasks import EXACT_KINDS, mixed_questions

NUM_ROWS = 200


def lines() -> str:
    """One row a line, with the right answer beside the question: a column that `deployments.bulk` leaves alone."""
    rows = [
        {
            "id": f"{question.kind}-{number:03}",
            "messages": [{"role": "user", "content": question.prompt}],
            "temperature": 0,
            "answer": question.answer,
        }
        for number, question in enumerate(mixed_questions(NUM_ROWS, kinds=(*EXACT_KINDS, "story")))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    print(lines(), end="")
