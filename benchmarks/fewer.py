"""Speed of training with compressed messages over slow links.

`fewer`: the laboratory and the task of `lab`: torch's DDP with its hooks against our best codecs, which may need more
steps. `shakespeare`: the network and text of examples/shakespeare.py, batch 32 a host; the held-out loss of `allreduce`
after one epoch is the target of the other ways, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import lab
from benchmarks.lab import Outcome, Terms
from benchmarks.measure import save

QUESTIONS = {
    "fewer": "seconds and megabytes to a test accuracy on MNIST of 4 hosts behind slow links, encoded and not",
    "shakespeare": "seconds, steps and megabytes to the held-out loss of one pass of allreduce over Shakespeare",
}
WANTED = 5.0
"""Wanted speed, as a multiple of the speed of DDP's fastest hook."""


def run(terms: Terms) -> dict[str, Any]:
    """Measure all ways of a contest, print the figures and write them to the results."""
    print(f"{terms.contest}: {QUESTIONS[terms.contest]}", flush=True)
    outcomes, reached_mbit = lab.run_all(terms)
    best = _best(terms, outcomes) if terms.contest == "fewer" else {}
    if best:
        print(f"  {best['ours']} is {best['speed']:.2f} times as fast as {best['theirs']}")
    record = {
        "question": QUESTIONS[terms.contest],
        **lab.about(terms, outcomes, reached_mbit),
        "target": terms.target if terms.target is not None else _reached(terms, outcomes),
        "steps": {way: _mean(outcomes, way, "steps") for way in terms.ways},
        "megabytes_a_host": {way: _megabytes(outcomes, way) for way in terms.ways},
        "optimizers": {way: str(terms.way(way).optimizer) for way in terms.ways},
        **({"wanted": WANTED, "best": best} if best else {}),
        "runs": [lab.run_record(one) for one in outcomes],
    }
    print(f"  kept in {save(terms.contest, record, trial=terms.is_trial)}")
    return record


def _best(terms: Terms, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the fastest recipe, the fastest hook of DDP and the ratio of their seconds; empty if either is missing."""
    seconds = {way: lab.median(outcomes, way, "seconds") for way in terms.ways}
    reached = {way: value for way, value in seconds.items() if value is not None}
    ours = [way for way in reached if terms.way(way).recipe]
    theirs = [way for way in reached if terms.way(way).has_hook]
    if not ours or not theirs:
        return {}
    fastest, fastest_hook = min(ours, key=reached.__getitem__), min(theirs, key=reached.__getitem__)
    return {"ours": fastest, "theirs": fastest_hook, "speed": reached[fastest_hook] / reached[fastest]}


def _reached(terms: Terms, outcomes: Sequence[Outcome]) -> float:
    return statistics.mean(one.found for one in outcomes if one.way == terms.ways[0])


def _mean(outcomes: Sequence[Outcome], way: str, field: str) -> float:
    return statistics.mean(getattr(one, field) for one in outcomes if one.way == way)


def _megabytes(outcomes: Sequence[Outcome], way: str) -> float:
    """Return the mean number of megabytes that a host sent in the whole run, as counted on its link."""
    return statistics.mean(statistics.mean(one.sent_on_links) for one in outcomes if one.way == way) / 1e6
