"""What do fewer bytes buy behind slow links?

`fewer`: the laboratory and the task of `lab`: torch's DDP with its hooks against our best codecs, which may need more
steps. `shakespeare`: the network and text of examples/shakespeare.py, batch 32 a host; what `allreduce` has reached
after one pass, held-out loss, is the target of the others, measured in the same run.
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
"""Times as fast as the best of DDP's hooks."""


def run(terms: Terms) -> dict[str, Any]:
    """Take the figures of a contest, print them, keep them."""
    print(f"{terms.contest}: {QUESTIONS[terms.contest]}", flush=True)
    outcomes, reached_mbit = lab.taken(terms)
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
        "runs": [lab.recorded(one) for one in outcomes],
    }
    print(f"  kept in {save(terms.contest, record, trial=terms.is_trial)}")
    return record


def _best(terms: Terms, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The fastest of ours and of DDP with a hook, and theirs / ours; nothing where one is missing."""
    seconds = {way: lab.median(outcomes, way, "seconds") for way in terms.ways}
    reached = {way: value for way, value in seconds.items() if value is not None}
    ours = [way for way in reached if terms.way(way).recipe]
    theirs = [way for way in reached if terms.way(way).has_hook]
    if not ours or not theirs:
        return {}
    one, other = min(ours, key=reached.__getitem__), min(theirs, key=reached.__getitem__)
    return {"ours": one, "theirs": other, "speed": reached[other] / reached[one]}


def _reached(terms: Terms, outcomes: Sequence[Outcome]) -> float:
    return statistics.mean(one.found for one in outcomes if one.way == terms.ways[0])


def _mean(outcomes: Sequence[Outcome], way: str, what: str) -> float:
    return statistics.mean(getattr(one, what) for one in outcomes if one.way == way)


def _megabytes(outcomes: Sequence[Outcome], way: str) -> float:
    """What a host sent, from its start to its end, as its link saw it."""
    return statistics.mean(statistics.mean(one.sent_on_links) for one in outcomes if one.way == way) / 1e6
