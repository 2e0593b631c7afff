"""Which steps stand out: a loss or gradient norm far above those before it, flagged with the samples of its batch.

Loss and norm are compared on a logarithmic scale with the median of the last WINDOW steps; the measure of distance is
the median of the absolute deviations (times 1.4826, which is one standard deviation where they are normal), and at
least MIN_SPREAD, so that a loss that hardly moves does not flag noise. Medians, because one spike must not hide the
next. A step that stands out is trained all the same: it is finite and its batch was valid. Who wants it not to be
trained limits the norm (optimizer.max_grad_norm). Both numbers are the same on all ranks, so all flag the same steps.

Cost: two sorts of WINDOW numbers a step. The history is of this process: after a resume the first WARM_UP steps are not
judged.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

WINDOW = 64
WARM_UP = 16
MIN_SPREAD = 0.05


@dataclass(frozen=True, kw_only=True)
class Spike:
    """What stood out ("loss" or "grad_norm"), its value, the median before it, and the distance in spreads."""

    figure: str
    value: float
    median: float
    distance: float


class SpikeWatch:
    """factor: a step is flagged beyond so many spreads above the median; 0: never."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._history: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("loss", "grad_norm")}

    def look(self, **figures: float) -> Spike | None:
        """look(loss=0.7, grad_norm=1.2) -> the figure that stands out most, if one does. Both join the history.

        Example: after 16 steps of loss 0.7 a loss of 1.4 is log(2) / 0.05 = 13.9 spreads above.
        """
        if not self.factor:
            return None
        found = []
        for name, value in figures.items():
            history, level = self._history[name], math.log(max(value, 1e-30))
            if len(history) >= WARM_UP:
                median = statistics.median(history)
                spread = max(1.4826 * statistics.median(abs(past - median) for past in history), MIN_SPREAD)
                distance = (level - median) / spread
                if distance > self.factor:
                    found.append(Spike(figure=name, value=value, median=math.exp(median), distance=distance))
            history.append(level)
        return max(found, key=lambda spike: spike.distance, default=None)
