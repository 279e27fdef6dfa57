"""Predicts output lengths from those of ended requests. It only has to tell short from long."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque

from app.engine.request import Request

WINDOW = 64  # outputs remembered of each kind
MIN_OUTPUTS = 4  # with fewer, there is no prediction for a kind
MAX_KINDS = 4_096
# A prediction is the median: half of the refusals by a higher quantile would be of requests that would have met their
# deadlines.
EXPECTED_QUANTILE = 0.5
_NEWEST_SHARE = 0.02  # of the error's moving average

# A tenant (None: all of them) and the class of the prompt's length.
_Kind = tuple[str | None, int]


class LengthPredictor:
    """A running quantile of output lengths for each tenant and class of prompt lengths, in bounded memory.

    Prompts are of one class when their lengths have the same power of two below them. A tenant with too few ended
    requests gets the prediction for all tenants.
    """

    def __init__(self) -> None:
        self._windows: OrderedDict[_Kind, _Window] = OrderedDict()  # the longest unused first
        self.mean_error_tokens = 0.0  # of predicted output lengths, without sign; a moving average

    def predict(self, request: Request, *, quantile: float = EXPECTED_QUANTILE) -> int | None:
        """Expected output tokens, at least 1 and at most `max_tokens`; None while too few such requests have ended."""
        sampling = request.sampling
        if not (sampling.ends_at_eos or sampling.stop_token_ids):
            return sampling.max_tokens  # nothing else ends it
        for kind in _kinds(request):
            window = self._windows.get(kind)
            if window is not None and len(window) >= MIN_OUTPUTS:
                return max(1, sampling.min_tokens, min(sampling.max_tokens, window.quantile(quantile)))
        return None

    def learn(self, request: Request, *, num_generated: int, num_predicted: int) -> None:
        """A request has ended by stop or length, with so many tokens."""
        self.mean_error_tokens += _NEWEST_SHARE * (abs(num_predicted - num_generated) - self.mean_error_tokens)
        for kind in _kinds(request):
            window = self._windows.get(kind)
            if window is None:
                window = self._windows[kind] = _Window()
                if len(self._windows) > MAX_KINDS:
                    self._windows.popitem(last=False)
            else:
                self._windows.move_to_end(kind)
            window.add(num_generated)


class _Window:
    """The last outputs of one kind, by age and by length."""

    def __init__(self) -> None:
        self._by_age: deque[int] = deque()
        self._by_length: list[int] = []

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, length: int) -> None:
        if len(self._by_age) == WINDOW:
            del self._by_length[bisect_left(self._by_length, self._by_age.popleft())]
        self._by_age.append(length)
        insort(self._by_length, length)

    def quantile(self, share: float) -> int:
        return self._by_length[int(share * len(self._by_length))]


def _kinds(request: Request) -> tuple[_Kind, _Kind]:
    length_class = len(request.prompt_token_ids).bit_length()
    return (request.tenant, length_class), (None, length_class)
