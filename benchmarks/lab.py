"""How long do four hosts behind slow links take to learn MNIST?

4 hosts, 100 Mbit/s each way, 0.8 M parameters, SGD with momentum 0.9 and learning rate 0.05, batch 32 a host, one
thread a host: seconds to 97.5% of the test images, evaluations not counted. The bytes that each host sent are read off
its link and compared with what Stretto says it sent. Other contests in the same laboratory: see `fewer`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.laboratory import Laboratory, Traffic
from benchmarks.measure import save
from benchmarks.race import Way
from benchmarks.ways import CONTESTS, WAYS
from stretto.events import read_events

QUESTION = "seconds to a test accuracy on MNIST of 4 hosts behind slow links, against the same written by hand"
WANTED = 1.0


@dataclass(frozen=True)
class Terms:
    """What all ways have in common."""

    hosts: int = 4
    mbit: float = 100.0
    target: float | None = 0.975
    """None: what the first way has reached at its end."""
    seeds: Sequence[int] = (0,)
    ways: Sequence[str] = tuple(WAYS)
    limit_s: float = 900.0
    contest: str = "lab"

    @property
    def is_trial(self) -> bool:
        """Whether this is less than the whole comparison."""
        return tuple(self.ways) != tuple(CONTESTS[self.contest]) or self.target not in (None, Terms.target)

    def way(self, name: str) -> Way:
        """A way of this contest."""
        return CONTESTS[self.contest][name]


@dataclass(frozen=True)
class Outcome:
    """One run. `seconds` is None when the target was not reached within the limit."""

    way: str
    seed: int
    seconds: float | None
    steps: int
    ms_a_step: float
    wall_seconds: float
    sent_on_links: Sequence[int]
    bytes_sent: Sequence[int] | None
    evaluations: Sequence[Mapping[str, float]] = field(repr=False)

    @property
    def found(self) -> float:
        """The last evaluation."""
        return self.evaluations[-1]["found"]

    @property
    def count_ratio(self) -> float | None:
        """What the links saw, relative to what Stretto says it sent: above 1 by the heads of the frames."""
        return sum(self.sent_on_links) / sum(self.bytes_sent) if self.bytes_sent and sum(self.bytes_sent) else None


def run(terms: Terms) -> dict[str, Any]:
    """Take the figures, print them, keep them."""
    print(f"lab: {QUESTION}", flush=True)
    outcomes, reached_mbit = taken(terms)
    ratios = _ratios(outcomes)
    for way, one in ratios.items():
        print(
            f"  speed of {way} / {WAYS[way].against}: {one['a_step']:.3f} a step, {_shown(one['to_target'])} to target"
        )
    record = {
        "question": QUESTION,
        "wanted": WANTED,
        **about(terms, outcomes, reached_mbit),
        "target": terms.target,
        "speed_ratios": ratios,
        "runs": [recorded(one) for one in outcomes],
    }
    print(f"  kept in {save('lab', record, trial=terms.is_trial)}")
    return record


def taken(terms: Terms) -> tuple[list[Outcome], float]:
    """All ways with all seeds in one laboratory, and the rate that its links really have, in Mbit/s."""
    for name in terms.ways:
        terms.way(name).course.samples()  # The hosts can't reach the outside: the data must be here before.
    with Laboratory(terms.hosts, terms.mbit) as lab:
        reached_mbit = lab.measure_mbit()
        print(f"  one connection reaches {reached_mbit:.1f} Mbit/s on a link of {terms.mbit:g}", flush=True)
        found: list[Outcome] = []
        for way, seed in _turns(terms):
            found.append(_report(race(lab, way, seed, _with_target(terms, seed, found))))
    return found, reached_mbit


def _with_target(terms: Terms, seed: int, found: Sequence[Outcome]) -> Terms:
    """The target that the first way has set for this seed, if it has."""
    first = [one.found for one in found if one.way == terms.ways[0] and one.seed == seed]
    return replace(terms, target=first[0]) if first and terms.target is None else terms


def about(terms: Terms, outcomes: Sequence[Outcome], reached_mbit: float) -> dict[str, Any]:
    """What a record says of the laboratory, and the medians of each way."""
    return {
        "link_mbit": terms.mbit,
        "reached_mbit": reached_mbit,
        "hosts": terms.hosts,
        "limit_s": terms.limit_s,
        "threads": 1,
        "recipes": {way: terms.way(way).recipe for way in terms.ways if terms.way(way).recipe},
        "seconds_to_target": {way: median(outcomes, way, "seconds") for way in terms.ways},
        "ms_a_step": {way: median(outcomes, way, "ms_a_step") for way in terms.ways},
    }


def _turns(terms: Terms) -> list[tuple[str, int]]:
    """All ways with each seed, forwards and backwards; a way that sets the target goes before the others."""
    first = list(terms.ways[:1] if terms.target is None else ())
    rest = list(terms.ways[len(first) :])
    orders = [first + (rest if number % 2 == 0 else rest[::-1]) for number in range(len(terms.seeds))]
    return [(way, seed) for seed, order in zip(terms.seeds, orders, strict=True) for way in order]


def race(lab: Laboratory, way: str, seed: int, terms: Terms) -> Outcome:
    """One way, from the start of its processes to their end."""
    hosts = terms.way(way).hosts or terms.hosts
    with tempfile.TemporaryDirectory(prefix="stretto-lab-") as folder:
        before = [lab.traffic(host) for host in range(hosts)]
        began = time.monotonic()
        _train(lab, way, seed, hosts, Path(folder), terms)
        wall_s = time.monotonic() - began
        after = [lab.traffic(host) for host in range(hosts)]
        traffic = [now.since(then) for now, then in zip(after, before, strict=True)]
        return _outcome(way, seed, Path(folder), traffic, wall_s, sets_target=terms.target is None)


def _train(lab: Laboratory, way: str, seed: int, hosts: int, folder: Path, terms: Terms) -> None:
    """Run the way on its hosts. When the time is up the processes are ended; what was reached counts."""
    target = terms.way(way).course.never if terms.target is None else terms.target
    command = [sys.executable, "-m", "benchmarks.host", terms.contest, way, str(folder), str(target), str(seed)]
    root = Path(__file__).resolve().parents[1]
    logs = [(folder / f"host-{host}.log").open("w+b") for host in range(hosts)]
    started = [
        lab.start(host, command, {**lab.place(host, hosts, folder), **_environment(root)}, log)
        for host, log in enumerate(logs)
    ]
    limit = time.monotonic() + terms.limit_s
    try:
        while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
            if time.monotonic() > limit:
                return
            time.sleep(0.05)
        for host, one in enumerate(started):
            if one.poll():
                raise SystemExit(f"{way}: host {host} failed\n{(folder / f'host-{host}.log').read_text()[-3000:]}")
    finally:
        for one in started:
            one.kill()
            one.wait()
        for log in logs:
            log.close()


def _environment(root: Path) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}


def _outcome(
    way: str, seed: int, folder: Path, traffic: Sequence[Traffic], wall_s: float, *, sets_target: bool
) -> Outcome:
    evaluations = _lines(folder / "evaluations.jsonl")
    if not evaluations:
        raise SystemExit(f"{way}: no evaluation within {wall_s:.0f} s; try a larger --limit")
    last = evaluations[-1]
    return Outcome(
        way=way,
        seed=seed,
        seconds=last["seconds"] if sets_target or (folder / "reached").exists() else None,
        steps=int(last["step"]),
        ms_a_step=1000 * last["seconds"] / last["step"],
        wall_seconds=wall_s,
        sent_on_links=[one.sent for one in traffic],
        bytes_sent=_said(folder / "events.jsonl"),
        evaluations=evaluations,
    )


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _said(log: Path) -> list[int] | None:
    """What each worker says in the end that it sent; None for ways that are not ours, or that have a server too."""
    if not log.exists():
        return None
    events = list(read_events(log))
    if any(event["event"] == "start" and event["servers"] for event in events):
        return None
    ends = {event["worker"]: event["bytes_sent"] for event in events if event["event"] == "end"}
    return [ends[worker] for worker in sorted(ends)]


def _report(one: Outcome) -> Outcome:
    megabytes = statistics.mean(one.sent_on_links) / 1e6
    count = f", {one.count_ratio:.3f} of what it counted" if one.count_ratio else ""
    print(
        f"  {one.way:16} {_shown(one.seconds):>8} s, {one.steps:5} steps of {one.ms_a_step:7.2f} ms, "
        f"{megabytes:8.1f} MB sent a host{count}",
        flush=True,
    )
    return one


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}" if number < 2 else f"{number:.1f}"


def _ratios(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Theirs / ours. Steps to the target depend on the order of the samples, the time of a step does not."""
    ways = {one.way for one in outcomes}
    pairs = {way: WAYS[way].against for way in WAYS if way in ways and WAYS[way].against in ways}
    return {way: _against(outcomes, way, other) for way, other in pairs.items()}


def _against(outcomes: Sequence[Outcome], way: str, other: str) -> dict[str, Any]:
    ours, theirs = median(outcomes, way, "seconds"), median(outcomes, other, "seconds")
    a_step = [median(outcomes, one, "ms_a_step") or 0.0 for one in (other, way)]
    return {"against": other, "a_step": a_step[0] / a_step[1], "to_target": theirs / ours if ours and theirs else None}


def median(outcomes: Sequence[Outcome], way: str, what: str) -> float | None:
    """The median over the seeds; None when one of them did not get there."""
    values = [getattr(one, what) for one in outcomes if one.way == way]
    return None if None in values else float(statistics.median(values))


def recorded(one: Outcome) -> dict[str, Any]:
    """A run for the JSON."""
    shown = {name: value for name, value in vars(one).items() if name != "evaluations"}
    return {**shown, "count_ratio": one.count_ratio, "evaluations": list(one.evaluations)}
