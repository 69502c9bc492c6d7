"""Targets: a metric, a comparison and a number, such as `test_accuracy>=0.95`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stretto.call_syntax import nearest
from stretto.errors import LaunchError, explain
from stretto.events import Event
from stretto.report.run_log import number

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
SHAPE = re.compile(r"\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<comparison>>=|<=|>|<)\s*(?P<number>[^<>=\s]+)\s*")


@dataclass(frozen=True)
class Target:
    """Condition on the metrics of an evaluation.

    >>> Target.parse("test_accuracy >= 0.95")
    Target(metric='test_accuracy', comparison='>=', number=0.95)
    """

    metric: str
    comparison: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a target. Raises LaunchError for malformed text."""
        match = SHAPE.fullmatch(text)
        if match is None:
            raise LaunchError(_malformed(text))
        try:
            value = number(float(match["number"]))
        except ValueError:
            value = None
        if value is None:
            raise LaunchError(_malformed(text))
        return cls(match["metric"], match["comparison"], value)

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.number:g}"

    def satisfied(self, metrics: dict[str, object]) -> bool:
        """Return True if the metrics of an evaluation satisfy the target."""
        value = number(metrics.get(self.metric))
        return value is not None and COMPARISONS[self.comparison](value, self.number)

    def reached(self, evaluations: Iterable[Event]) -> dict[str, float] | None:
        """Return the training seconds and the samples at the first evaluation that satisfies the target, or None."""
        for event in evaluations:
            if self.satisfied(event.get("metrics") or {}):
                return {"seconds": float(event["training_s"]), "samples": int(event["samples"])}
        return None

    def check(self, metrics: Iterable[str]) -> None:
        """Raise LaunchError unless the metric of the target is among `metrics`."""
        names = sorted(metrics)
        if self.metric in names:
            return
        if not names:
            raise LaunchError(_no_metrics(self))
        near = nearest(self.metric, names) or names[0]
        raise LaunchError(
            explain(
                f"`evaluate` does not return {self.metric!r}, the metric of the target",
                got=self,
                expected="one of " + ", ".join(names),
                to_type=f'--target "{near}{self.comparison}{self.number:g}"',
            )
        )


def _malformed(text: str) -> str:
    return explain(
        "the target cannot be parsed",
        got=repr(text),
        expected="the name of a metric, one of " + " ".join(COMPARISONS) + ", and a finite number",
        to_type='--target "test_accuracy>=0.95"',
    )


def _no_metrics(target: Target) -> str:
    return explain(
        f"the target {target} cannot be measured: the run in a single process has no evaluation",
        got="no evaluation in its log",
        expected="a script that gives `evaluate` to stretto.distribute",
        to_type="stretto.distribute(model, optimizer, loader, evaluate=accuracy)",
    )
