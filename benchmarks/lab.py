"""Time that four hosts behind slow links take to learn MNIST.

4 hosts, 100 Mbit/s each way, 0.8 M parameters, SGD with momentum 0.9 and learning rate 0.05, batch 32 a host, one
thread a host: seconds to 97.5% of the test images, evaluations not counted. The bytes that each host sent are read from
its link and compared with the bytes that Stretto reports. For other contests in the same laboratory see `fewer`.
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
    """Settings shared by all ways of a contest."""

    hosts: int = 4
    mbit: float = 100.0
    target: float | None = 0.975
    """Target of the quality measure; None: the final quality of the first way."""
    seeds: Sequence[int] = (0,)
    ways: Sequence[str] = tuple(WAYS)
    limit_s: float = 900.0
    contest: str = "lab"

    @property
    def is_trial(self) -> bool:
        """True if the run covers less than the whole comparison."""
        return tuple(self.ways) != tuple(CONTESTS[self.contest]) or self.target not in (None, Terms.target)

    def way(self, name: str) -> Way:
        """Return a way of this contest by its name."""
        return CONTESTS[self.contest][name]


@dataclass(frozen=True)
class Outcome:
    """Result of one run. `seconds` is None when the target was not reached within the limit."""

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
        """Result of the last evaluation."""
        return self.evaluations[-1]["found"]

    @property
    def count_ratio(self) -> float | None:
        """Bytes on the links divided by the bytes that Stretto reports: above 1 because of frame headers."""
        return sum(self.sent_on_links) / sum(self.bytes_sent) if self.bytes_sent and sum(self.bytes_sent) else None


def run(terms: Terms) -> dict[str, Any]:
    """Measure all ways, print the figures and write them to the results."""
    print(f"lab: {QUESTION}", flush=True)
    outcomes, reached_mbit = run_all(terms)
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
        "runs": [run_record(one) for one in outcomes],
    }
    print(f"  kept in {save('lab', record, trial=terms.is_trial)}")
    return record


def run_all(terms: Terms) -> tuple[list[Outcome], float]:
    """Run all ways with all seeds in one laboratory; also return the measured rate of a link, in Mbit/s."""
    for name in terms.ways:
        terms.way(name).course.samples()  # The hosts have no access to the network outside: load the data before.
    with Laboratory(terms.hosts, terms.mbit) as laboratory:
        reached_mbit = laboratory.measure_mbit()
        print(f"  one connection reaches {reached_mbit:.1f} Mbit/s on a link of {terms.mbit:g}", flush=True)
        outcomes: list[Outcome] = []
        for way, seed in _turns(terms):
            outcomes.append(_report(race(laboratory, way, seed, _with_target(terms, seed, outcomes))))
    return outcomes, reached_mbit


def _with_target(terms: Terms, seed: int, outcomes: Sequence[Outcome]) -> Terms:
    """Return the terms with the target that the first way has set for this seed, if it has been run."""
    first = [one.found for one in outcomes if one.way == terms.ways[0] and one.seed == seed]
    return replace(terms, target=first[0]) if first and terms.target is None else terms


def about(terms: Terms, outcomes: Sequence[Outcome], reached_mbit: float) -> dict[str, Any]:
    """Return the settings of the laboratory and the medians of each way, for the record."""
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
    """Return all ways with each seed, in alternating order; a way that sets the target comes first."""
    first = list(terms.ways[:1] if terms.target is None else ())
    rest = list(terms.ways[len(first) :])
    orders = [first + (rest if number % 2 == 0 else rest[::-1]) for number in range(len(terms.seeds))]
    return [(way, seed) for seed, order in zip(terms.seeds, orders, strict=True) for way in order]


def race(lab: Laboratory, way: str, seed: int, terms: Terms) -> Outcome:
    """Run one way, from the start of its processes to their end."""
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
    """Run the way on its hosts. At the time limit the processes are killed; evaluations until then count."""
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
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            if time.monotonic() > limit:
                return
            time.sleep(0.05)
        for host, process in enumerate(started):
            if process.poll():
                raise SystemExit(f"{way}: host {host} failed\n{(folder / f'host-{host}.log').read_text()[-3000:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
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
        bytes_sent=_reported_bytes(folder / "events.jsonl"),
        evaluations=evaluations,
    )


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _reported_bytes(log: Path) -> list[int] | None:
    """Return the bytes that each worker reports at its end; None for ways without Stretto or with a server."""
    if not log.exists():
        return None
    events = list(read_events(log))
    if any(event["event"] == "start" and event["servers"] for event in events):
        return None
    ends = {event["worker"]: event["bytes_sent"] for event in events if event["event"] == "end"}
    return [ends[worker] for worker in sorted(ends)]


def _report(outcome: Outcome) -> Outcome:
    megabytes = statistics.mean(outcome.sent_on_links) / 1e6
    count = f", {outcome.count_ratio:.3f} of the bytes it reports" if outcome.count_ratio else ""
    print(
        f"  {outcome.way:16} {_shown(outcome.seconds):>8} s, {outcome.steps:5} steps of {outcome.ms_a_step:7.2f} ms, "
        f"{megabytes:8.1f} MB sent a host{count}",
        flush=True,
    )
    return outcome


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}" if number < 2 else f"{number:.1f}"


def _ratios(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Return the ratios theirs / ours: to the target, which depends on the order of the samples, and by step."""
    ways = {one.way for one in outcomes}
    pairs = {way: WAYS[way].against for way in WAYS if way in ways and WAYS[way].against in ways}
    return {way: _against(outcomes, way, other) for way, other in pairs.items()}


def _against(outcomes: Sequence[Outcome], way: str, other: str) -> dict[str, Any]:
    ours, theirs = median(outcomes, way, "seconds"), median(outcomes, other, "seconds")
    a_step = [median(outcomes, one, "ms_a_step") or 0.0 for one in (other, way)]
    return {"against": other, "a_step": a_step[0] / a_step[1], "to_target": theirs / ours if ours and theirs else None}


def median(outcomes: Sequence[Outcome], way: str, field: str) -> float | None:
    """Return the median over the seeds; None when the value of one seed is missing."""
    values = [getattr(one, field) for one in outcomes if one.way == way]
    return None if None in values else float(statistics.median(values))


def run_record(one: Outcome) -> dict[str, Any]:
    """Return a run's record for the JSON file."""
    shown = {name: value for name, value in vars(one).items() if name != "evaluations"}
    return {**shown, "count_ratio": one.count_ratio, "evaluations": list(one.evaluations)}
