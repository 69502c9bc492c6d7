"""Was it worth it? One plain sentence from the records, and what has to be known to believe it.

Rules
- Alone means the better of two: the script's batch, and the joined batch of all workers.
- With a target, the training time to it counts, and only recipes that reached it on every seed compete.
  When nobody did, time for the same data is compared instead.
- Without a target, time for the same data counts, among runs that ended as good as the best alone, within a
  tolerance.
- Faster means by more than `TIE`, and with several seeds that the ranges do not overlap.
- More than n times as fast on n workers is not believed.
- A failed run makes its recipe no candidate.
- Nothing is claimed that was not measured: one seed, a missing `evaluate` and shared cores are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.report import formatting, metrics
from stretto.report.aggregation import Group, Measure, Peers, Spread, grouped
from stretto.report.run_record import Record
from stretto.report.tables import metric_names, reached, speed_up
from stretto.report.target import Target

BELIEVED = 1.1
"""Speed-ups beyond so many times the number of workers say that the run alone was held up."""

TIE = 0.05
"""Times nearer to each other than this share are taken for equal."""

STAY = "Stay on one machine: "
WORTH = "Worth it: "
DOUBTFUL = "Faster, but hard to believe: "
FASTER = "Faster, but not known to be as good: "
UNKNOWN = "No verdict: "


@dataclass(frozen=True)
class Verdict:
    """`worth` is None when the runs cannot tell. The sentence stands alone; the caveats belong to it."""

    worth: bool | None
    sentence: str
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.caveats))

    def noting(self, *caveats: str) -> Verdict:
        """The same with more caveats, the empty ones left out."""
        return Verdict(self.worth, self.sentence, (*self.caveats, *(text for text in caveats if text)))


def verdict(records: Sequence[Record], target: Target | None = None) -> Verdict:
    """Judge a comparison; `reached` of the records is about `target`."""
    groups = grouped(records)
    alone = [group for group in groups if group.single_process and group.whole]
    spread = [group for group in groups if group.workers > 1 and group.whole]
    judged = _impossible(groups, alone, spread) or _judge(alone, spread, target)
    beyond = _beyond_belief(spread, Peers(records))
    if judged.worth and beyond:
        judged = Verdict(None, judged.sentence.replace(WORTH, DOUBTFUL, 1))
    return judged.noting(beyond, _cores(groups), _failed(groups), _seeds(groups))


def _impossible(groups: Sequence[Group], alone: Sequence[Group], spread: Sequence[Group]) -> Verdict | None:
    if all(group.workers == 1 for group in groups):
        return Verdict(None, UNKNOWN + "no distributed run was made.")
    if not alone:
        return Verdict(None, UNKNOWN + "the runs alone failed, so there is nothing to compare with.")
    return None if spread else Verdict(None, UNKNOWN + "every distributed recipe failed in at least one run.")


def _judge(alone: Sequence[Group], spread: Sequence[Group], target: Target | None) -> Verdict:
    if target is None:
        return _by_data(alone, spread, None)
    unreached = f"No recipe, and no run alone, reached {target} on every seed: time for the same data was compared."
    return _by_target(alone, spread, target) or _by_data(alone, spread, target).noting(unreached)


@dataclass(frozen=True)
class Timed:
    """A group and its time, over seeds."""

    group: Group
    time: Spread

    def __str__(self) -> str:
        return _name(self.group)


def _fastest(groups: Sequence[Group], measure: Measure) -> Timed | None:
    """The group with the least median time, among those that have one on every seed."""
    timed = [Timed(group, spread) for group in groups if (spread := group.spread(measure))]
    able = [one for one in timed if one.time.count == len(one.group.asked)]
    return min(able, key=lambda one: one.time.median, default=None)


def _seconds(record: Record) -> float | None:
    value: float | None = record["seconds"]
    return value


def _to_target(record: Record) -> float | None:
    return reached(record, "seconds")


def _by_target(alone: Sequence[Group], spread: Sequence[Group], target: Target) -> Verdict | None:
    """Compare the time to the target, or None when nobody reached it on every seed."""
    single, best = _fastest(alone, _to_target), _fastest(spread, _to_target)
    if single and best:
        return _by_times(single, best, verb=f"reached {target} in", rival="the fastest distributed run", tail="")
    winner = single or best
    return _only_one_reached(winner, target) if winner else None


def _only_one_reached(winner: Timed, target: Target) -> Verdict:
    every = "" if len(winner.group.asked) == 1 else " on every seed"
    reached_it = f"{winner} reached {target} in {_text(winner.time)}"
    if winner.group.single_process:
        return Verdict(False, f"{STAY}{reached_it}; no distributed run reached it{every} with the same data.")
    return Verdict(True, f"{WORTH}{reached_it}; alone did not{every} with the same data.")


def _by_data(alone: Sequence[Group], spread: Sequence[Group], target: Target | None) -> Verdict:
    """Compare the time for the same data."""
    names = metric_names([record for group in (*alone, *spread) for record in group.records])
    metric = target.metric if target and target.metric in names else metrics.main_metric(names)
    if _fastest(alone, _seconds) is None or _fastest(spread, _seconds) is None:
        return Verdict(None, UNKNOWN + "the runs left no training time in their logs.")
    ideal = metrics.best(alone, metric) if metric else None
    if metric and ideal:
        return _as_good(alone, spread, ideal, metric)
    unmeasured = "the script gives no `evaluate`" if metric is None else f"alone ended without a finite {metric}"
    return _by_speed(alone, spread).noting(f"Quality was not measured: {unmeasured}.")


def _as_good(alone: Sequence[Group], spread: Sequence[Group], ideal: Group, metric: str) -> Verdict:
    """Compare the times of those that ended as good as the best alone."""
    good = [group for group in spread if metrics.as_good(group, ideal, metric)]
    single = _fastest([group for group in alone if metrics.as_good(group, ideal, metric)], _seconds)
    best = _fastest(good, _seconds)
    if single is None or best is None:
        return _none_as_good(spread, ideal, metric)
    here, there = metrics.text(best.group, metric), metrics.text(single.group, metric)
    tolerance = f"within {metrics.tolerance_text(metric, ideal)} counts as equal"
    rival, tail = "the fastest distributed run that ended as good", " for the same data"
    judged = _by_times(single, best, verb="took", rival=rival, tail=tail)
    judged = judged.noting(f"They ended with {metric} {here} and, alone, {there}: {tolerance}.")
    return judged.noting(_faster_but_worse([g for g in spread if g not in good], single, metric))


def _none_as_good(spread: Sequence[Group], ideal: Group, metric: str) -> Verdict:
    near = metrics.nearest(spread, ideal, metric)
    had = f"{_name(ideal)} had {metric} {metrics.text(ideal, metric)} {_after(ideal)}"
    came = f"after the same data nothing distributed came within {metrics.tolerance_text(metric, ideal)} of it"
    rest = f"; the nearest, {_name(near)}, had {metrics.text(near, metric)} {_after(near)}" if near else ""
    return Verdict(False, f"{STAY}{had}, and {came}{rest}.")


def _after(group: Group) -> str:
    time = group.spread(_seconds)
    return f"after {_text(time)}" if time else "after an unknown time"


def _faster_but_worse(spread: Sequence[Group], single: Timed, metric: str) -> str:
    """Name the fastest of those that were faster than alone and ended worse: it must not pass for a win."""
    best = _fastest(spread, _seconds)
    if best is None or best.time.median >= single.time.median:
        return ""
    return f"Faster, but not as good: {best} ({_text(best.time)}, {metric} {metrics.text(best.group, metric)})."


def _by_speed(alone: Sequence[Group], spread: Sequence[Group]) -> Verdict:
    """Nothing was evaluated: speed is all that can be compared, and not enough for a yes."""
    single, best = _fastest(alone, _seconds), _fastest(spread, _seconds)
    if single is None or best is None:
        return Verdict(None, UNKNOWN + "the runs left no training time in their logs.")
    tail, rival = " for the same data", "the fastest distributed run"
    judged = _by_times(single, best, verb="took", rival=rival, tail=tail)
    return Verdict(None if judged.worth else False, judged.sentence.replace(WORTH, FASTER, 1))


def _by_times(single: Timed, best: Timed, *, verb: str, rival: str, tail: str) -> Verdict:
    """The fastest distributed group against the fastest alone."""
    alone, other = f"{single} {verb} {_text(single.time)}", f"{best} {verb} {_text(best.time)}"
    if best.time.median >= single.time.median * (1 + TIE):
        ratio = _ratio(best.time, single.time)
        return Verdict(False, f"{STAY}{alone}; {rival}, {best}, needed {_text(best.time)}, {ratio}{tail}.")
    if best.time.median > single.time.median * (1 - TIE):
        return Verdict(False, f"{STAY}{other}, {single} {_text(single.time)}: no difference that counts{tail}.")
    if best.time.high >= single.time.low:
        return Verdict(False, f"{STAY}{other}, {single} {_text(single.time)}: the ranges over seeds overlap{tail}.")
    return Verdict(
        True, f"{WORTH}{other}; {single} needed {_text(single.time)}, {_ratio(single.time, best.time)}{tail}."
    )


def _ratio(long: Spread, short: Spread) -> str:
    if short.median <= 0:
        return "many times as long"
    return f"{formatting.figure(long.median / short.median, 2)} times as long"


def _text(time: Spread) -> str:
    median, low, high = (formatting.seconds(value) for value in (time.median, time.low, time.high))
    return median if low == high else f"{median} ({low} to {high})"


def _name(group: Group) -> str:
    if not group.single_process:
        return f"{group.recipe} on {formatting.plural(group.workers, 'worker')}"
    return "alone" if group.global_batch_of == 1 else f"alone with the joined batch (×{group.global_batch_of})"


def _beyond_belief(spread: Sequence[Group], peers: Peers) -> str:
    """Say it when a recipe made more of its workers than they can give: then alone was measured too slow."""
    found = [(group.median(lambda record: speed_up(record, peers)) or 0.0, group) for group in spread]
    ratio, group = max(found, key=lambda one: one[0] / one[1].workers, default=(0.0, None))
    if group is None or ratio < BELIEVED * group.workers:
        return ""
    return (
        f"{_name(group)} went through {formatting.figure(ratio, 2)} times the samples per second of alone: more "
        "than its workers can give. Something held up the run alone, as its own threads or other programs can; "
        "try --threads 1 on a quiet machine."
    )


def _cores(groups: Sequence[Group]) -> str:
    """Say it when the workers had no more computing power than the run alone."""
    alone = next((record for group in groups if group.single_process for record in group.records), None)
    sharing = [group for group in groups if alone and not group.single_process and _shares_cores(group, alone)]
    if not sharing or alone is None:
        return ""
    workers = " or ".join(str(count) for count in sorted({group.workers for group in sharing}))
    cores = formatting.plural(alone["cores"], "core")
    return f"The {workers} workers shared the {cores} of one machine; on machines of their own it may differ."


def _shares_cores(group: Group, alone: Record) -> bool:
    run: Record = next(iter(group.records), {})
    cores, threads = run.get("cores"), run.get("threads")
    if group.workers == 1 or not (cores and threads and alone["cores"] and alone["threads"]):
        return False
    wanted = group.workers * threads
    return bool(wanted > cores or min(cores, wanted) <= alone["threads"])


def _seeds(groups: Sequence[Group]) -> str:
    seeds = {record["seed"] for group in groups for record in group.asked}
    if len(seeds) > 1:
        return f"Medians over {len(seeds)} seeds, ranges in brackets."
    return "Measured with one seed: chance is not ruled out."


def _failed(groups: Sequence[Group]) -> str:
    failed = ", ".join(_name(group) for group in groups if not group.whole)
    return f"Left out, because a run failed: {failed}." if failed else ""
