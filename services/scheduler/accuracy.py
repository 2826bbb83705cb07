"""How well the tokens to come were foreseen, over the trajectories that ended since the last step.

In logarithms, as people read them: being wrong by a factor of two counts the same at 50 tokens
and at 5,000.
"""

from collections.abc import Iterable
from math import log1p


class Accuracy:
    """Sums over decisions of the predicted median and what came."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._error = self._error_squared = 0.0
        self._actual = self._actual_squared = 0.0

    def note(self, predicted: Iterable[tuple[int, float]], action_tokens: int) -> None:
        """A trajectory ended with so many sampled tokens.

        Args:
            predicted: at each decision, tokens sampled until then and the median of the rest.
            action_tokens: in all.
        """
        for sampled, median in predicted:
            actual = log1p(max(0, action_tokens - sampled))
            error = log1p(max(0.0, median)) - actual
            self._count += 1
            self._error += abs(error)
            self._error_squared += error * error
            self._actual += actual
            self._actual_squared += actual * actual

    def take(self) -> dict[str, float]:
        """The metrics, which begin anew after this; empty when nothing was predicted."""
        count = self._count
        if not count:
            return {}
        metrics = {"residual/decisions": count, "residual/log_error": self._error / count}
        spread = self._actual_squared - self._actual * self._actual / count
        if spread > 1e-9 * count:  # Else all were equally long, and there was nothing to explain.
            metrics["residual/r2"] = 1.0 - self._error_squared / spread
        self._clear()
        return metrics
