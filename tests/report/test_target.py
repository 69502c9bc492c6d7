"""A target is read, or refused with what to type."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import LaunchError
from stretto.report.target import COMPARISONS, Target


@given(
    metric=st.from_regex(r"[a-z][a-z_./@ 0-9]{0,20}[a-z0-9]", fullmatch=True),
    comparison=st.sampled_from(sorted(COMPARISONS)),
    number=st.floats(allow_nan=False, allow_infinity=False, width=16),
)
def test_printed_targets_can_be_parsed(metric: str, comparison: str, number: float) -> None:
    target = Target(metric, comparison, float(f"{number:g}"))
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text",
    ["", "accuracy", ">=0.9", "accuracy=0.9", "accuracy==0.9", "accuracy>=", "a>=b", "a>=nan", "a>=1>=2", "a>inf"],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="expected"):
        Target.parse(text)


def evaluation(training_s: float, samples: int, **metrics: Any) -> dict[str, Any]:
    return {"event": "evaluation", "training_s": training_s, "samples": samples, "metrics": metrics}


def test_reached_is_the_first_evaluation_that_satisfies_it() -> None:
    seen = [evaluation(1.0, 10, acc=0.5), evaluation(2.0, 20, acc=None), evaluation(3.0, 30, acc=0.9)]
    seen += [evaluation(4.0, 40, acc=0.95)]
    assert Target.parse("acc>=0.9").reached(seen) == {"seconds": 3.0, "samples": 30}
    assert Target.parse("acc>0.9").reached(seen) == {"seconds": 4.0, "samples": 40}
    assert Target.parse("acc<0.6").reached(seen) == {"seconds": 1.0, "samples": 10}
    assert Target.parse("acc>0.99").reached(seen) is None
    assert Target.parse("acc>0.9").reached([]) is None


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(LaunchError, match=r"test_accuracy>=0\.95") as caught:
        Target.parse("test_acuracy>=0.95").check(["test_loss", "test_accuracy"])
    assert "one of test_accuracy, test_loss" in str(caught.value)
    with pytest.raises(LaunchError, match="evaluate"):
        Target.parse("a>1").check([])
    Target.parse("a>1").check(["a", "b"])
