"""What an open page knows and draws."""

from __future__ import annotations

import json
from typing import Any


def seen(page: Any) -> dict[str, Any]:
    """What the page knows: for each replica the requests that had a slot, and why they left."""
    return dict(
        json.loads(
            page.evaluate("""async () => {
                const { history } = await import("/page/live.js");
                return JSON.stringify(Object.fromEntries(history.replicas().map((replica) => [replica.id, {
                    state: replica.state,
                    stays: replica.stays.map((stay) => [stay.id, stay.why, stay.isResumed, stay.left !== null]),
                }])));
            }""")
        )
    )


def stays(page: Any) -> list[list[Any]]:
    return [stay for replica in seen(page).values() for stay in replica["stays"]]


def colours(page: Any) -> int:
    """How many different colours the picture of the first replica has."""
    return int(
        page.evaluate("""() => {
            const canvas = document.querySelector(".replica canvas");
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(data.buffer)).size;
        }""")
    )
