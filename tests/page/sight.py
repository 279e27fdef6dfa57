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


def contrasts(page: Any) -> dict[str, float]:
    """The contrast of each visible text with what is behind it, as WCAG 2 computes it; of equal texts the least.

    Controls that are disabled do not count. A text under an opacity has the contrast 0: it is not computed.
    """
    return dict(page.evaluate(_CONTRASTS))


_CONTRASTS = """() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const linear = (part) => (part <= 0.04045 * 255 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = (colour) => {
        const [red, green, blue] = numbers(colour).map(linear);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const contrast = (one, other) => {
        const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
        return (light + 0.05) / (dark + 0.05);
    };
    const behind = (element) => {
        const colour = getComputedStyle(element).backgroundColor;
        return (numbers(colour)[3] ?? 1) === 1 ? colour : behind(element.parentElement);
    };
    const found = {};
    const note = (text, colour, element) => {
        for (let each = element; each; each = each.parentElement) {
            if (Number(getComputedStyle(each).opacity) < 1) found[text] = 0;
        }
        found[text] = Math.min(found[text] ?? 21, contrast(colour, behind(element)));
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const { parentElement: element, data } = walker.currentNode;
        const isShown = element.checkVisibility() && !element.closest(":disabled, canvas, script, noscript");
        if (data.trim() && isShown) note(data.trim(), getComputedStyle(element).color, element);
    }
    for (const element of document.querySelectorAll("[placeholder]")) {
        const { color } = getComputedStyle(element, "::placeholder");
        if (element.checkVisibility()) note(element.placeholder, color, element);
    }
    return found;
}"""
