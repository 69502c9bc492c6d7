"""Verdict of a comparison: whether distributed training paid off, in one sentence, with its caveats.

Rules
- The baseline is the better of two runs in a single process: with the script's batch, and with the global batch.
- With a target, the training time to the target counts, and only recipes that reached it on every seed compete.
  If no run reached it, the time for the same data is compared instead.
- Without a target, the time for the same data counts, among runs whose final metric is as good as that of the best
  baseline, within a tolerance.
- Faster means by more than `TIE`, and with several seeds also that the ranges do not overlap.
- A speed-up of more than `PLAUSIBLE` times n on n workers is not believed.
- A recipe with a failed run is not a candidate.
- Caveats name missing evidence: a single seed, a missing `evaluate`, shared cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.report import formatting, metrics
from stretto.report.aggregation import Baselines, Group, Measure, Spread, grouped
from stretto.report.run_record import Record
from stretto.report.tables import metric_names, reached, speed_up
from stretto.report.target import Target

PLAUSIBLE = 1.1
"""Largest plausible speed-up per worker; more means that other load slowed the run in a single process."""

TIE = 0.05
"""Relative difference below which two times count as equal."""

STAY = "Stay on one machine: "
WORTH = "Worth it: "
DOUBTFUL = "Faster, but hard to believe: "
FASTER = "Faster, but quality is unknown: "
UNKNOWN = "No verdict: "


@dataclass(frozen=True)
class Verdict:
    """Verdict in one sentence, with caveats. `worth` is None if the runs do not decide it."""

    worth: bool | None
    sentence: str
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.caveats))

    def noting(self, *caveats: str) -> Verdict:
        """Return the verdict with further caveats; empty texts are skipped."""
        return Verdict(self.worth, self.sentence, (*self.caveats, *(text for text in caveats if text)))


def verdict(records: Sequence[Record], target: Target | None = None) -> Verdict:
    """Return the verdict of a comparison; `reached` of the records refers to `target`."""
    groups = grouped(records)
    singles = [group for group in groups if group.single_process and group.complete]
    distributed = [group for group in groups if group.workers > 1 and group.complete]
    judged = _impossible(groups, singles, distributed) or _judge(singles, distributed, target)
    implausible = _implausible(distributed, Baselines(records))
    if judged.worth and implausible:
        judged = Verdict(None, judged.sentence.replace(WORTH, DOUBTFUL, 1))
    return judged.noting(implausible, _cores(groups), _failed(groups), _seeds(groups))


def _impossible(groups: Sequence[Group], singles: Sequence[Group], distributed: Sequence[Group]) -> Verdict | None:
    if all(group.workers == 1 for group in groups):
        return Verdict(None, UNKNOWN + "there is no distributed run.")
    if not singles:
        return Verdict(None, UNKNOWN + "the runs in a single process failed, so there is no baseline.")
    return None if distributed else Verdict(None, UNKNOWN + "every distributed recipe failed in at least one run.")


def _judge(singles: Sequence[Group], distributed: Sequence[Group], target: Target | None) -> Verdict:
    if target is None:
        return _by_data(singles, distributed, None)
    unreached = (
        f"No recipe and no single process reached {target} on every seed: the time for the same data was compared."
    )
    return _by_target(singles, distributed, target) or _by_data(singles, distributed, target).noting(unreached)


@dataclass(frozen=True)
class Timed:
    """Group of runs with its time over seeds."""

    group: Group
    time: Spread

    def __str__(self) -> str:
        return _name(self.group)


def _fastest(groups: Sequence[Group], measure: Measure) -> Timed | None:
    """Return the group with the smallest median time, among groups that have a time on every seed."""
    timed = [Timed(group, spread) for group in groups if (spread := group.spread(measure))]
    complete = [candidate for candidate in timed if candidate.time.count == len(candidate.group.asked)]
    return min(complete, key=lambda candidate: candidate.time.median, default=None)


def _seconds(record: Record) -> float | None:
    value: float | None = record["seconds"]
    return value


def _to_target(record: Record) -> float | None:
    return reached(record, "seconds")


def _by_target(singles: Sequence[Group], distributed: Sequence[Group], target: Target) -> Verdict | None:
    """Return the verdict by the time to the target, or None if no group reached it on every seed."""
    single, best = _fastest(singles, _to_target), _fastest(distributed, _to_target)
    if single and best:
        return _by_times(single, best, verb=f"reached {target} in", rival="the fastest distributed run", tail="")
    winner = single or best
    return _only_one_reached(winner, target) if winner else None


def _only_one_reached(winner: Timed, target: Target) -> Verdict:
    on_every_seed = "" if len(winner.group.asked) == 1 else " on every seed"
    reached_it = f"{winner} reached {target} in {_text(winner.time)}"
    if winner.group.single_process:
        return Verdict(False, f"{STAY}{reached_it}; no distributed run reached it{on_every_seed} with the same data.")
    return Verdict(True, f"{WORTH}{reached_it}; a single process did not{on_every_seed} with the same data.")


def _by_data(singles: Sequence[Group], distributed: Sequence[Group], target: Target | None) -> Verdict:
    """Return the verdict by the time for the same data."""
    names = metric_names([record for group in (*singles, *distributed) for record in group.records])
    metric = target.metric if target and target.metric in names else metrics.main_metric(names)
    if _fastest(singles, _seconds) is None or _fastest(distributed, _seconds) is None:
        return Verdict(None, UNKNOWN + "the runs left no training time in their logs.")
    baseline = metrics.best(singles, metric) if metric else None
    if metric and baseline:
        return _as_good(singles, distributed, baseline, metric)
    unmeasured = "the script gives no `evaluate`" if metric is None else f"the single process has no finite {metric}"
    return _by_speed(singles, distributed).noting(f"Quality was not measured: {unmeasured}.")


def _as_good(singles: Sequence[Group], distributed: Sequence[Group], baseline: Group, metric: str) -> Verdict:
    """Return the verdict by the times of the groups whose final metric is as good as that of the best baseline."""
    equal_or_better = [group for group in distributed if metrics.as_good(group, baseline, metric)]
    single = _fastest([group for group in singles if metrics.as_good(group, baseline, metric)], _seconds)
    best = _fastest(equal_or_better, _seconds)
    if single is None or best is None:
        return _none_as_good(distributed, baseline, metric)
    value, baseline_value = metrics.text(best.group, metric), metrics.text(single.group, metric)
    tolerance = f"within {metrics.tolerance_text(metric, baseline)} counts as equal"
    rival, tail = "the fastest distributed run of equal quality", " for the same data"
    judged = _by_times(single, best, verb="took", rival=rival, tail=tail)
    judged = judged.noting(f"Final {metric}: {value}, in a single process {baseline_value}; {tolerance}.")
    return judged.noting(_faster_but_worse([g for g in distributed if g not in equal_or_better], single, metric))


def _none_as_good(distributed: Sequence[Group], baseline: Group, metric: str) -> Verdict:
    near = metrics.nearest(distributed, baseline, metric)
    baseline_text = f"{_name(baseline)} had {metric} {metrics.text(baseline, metric)} {_after(baseline)}"
    came = f"after the same data no distributed run was within {metrics.tolerance_text(metric, baseline)} of it"
    nearest_text = f"; the nearest, {_name(near)}, had {metrics.text(near, metric)} {_after(near)}" if near else ""
    return Verdict(False, f"{STAY}{baseline_text}, and {came}{nearest_text}.")


def _after(group: Group) -> str:
    time = group.spread(_seconds)
    return f"after {_text(time)}" if time else "after an unknown time"


def _faster_but_worse(distributed: Sequence[Group], single: Timed, metric: str) -> str:
    """Return a caveat that names the fastest group that was faster than the single process but of worse quality."""
    best = _fastest(distributed, _seconds)
    if best is None or best.time.median >= single.time.median:
        return ""
    return f"Faster, but not as good: {best} ({_text(best.time)}, {metric} {metrics.text(best.group, metric)})."


def _by_speed(singles: Sequence[Group], distributed: Sequence[Group]) -> Verdict:
    """Return the verdict by speed only, without evaluations: it can be negative or open, not positive."""
    single, best = _fastest(singles, _seconds), _fastest(distributed, _seconds)
    if single is None or best is None:
        return Verdict(None, UNKNOWN + "the runs left no training time in their logs.")
    tail, rival = " for the same data", "the fastest distributed run"
    judged = _by_times(single, best, verb="took", rival=rival, tail=tail)
    return Verdict(None if judged.worth else False, judged.sentence.replace(WORTH, FASTER, 1))


def _by_times(single: Timed, best: Timed, *, verb: str, rival: str, tail: str) -> Verdict:
    """Return the verdict on the fastest distributed group and the fastest baseline."""
    single_text, best_text = f"{single} {verb} {_text(single.time)}", f"{best} {verb} {_text(best.time)}"
    if best.time.median >= single.time.median * (1 + TIE):
        ratio = _ratio(best.time, single.time)
        return Verdict(False, f"{STAY}{single_text}; {rival}, {best}, needed {_text(best.time)}, {ratio}{tail}.")
    if best.time.median > single.time.median * (1 - TIE):
        return Verdict(False, f"{STAY}{best_text}, {single} {_text(single.time)}: no relevant difference{tail}.")
    if best.time.high >= single.time.low:
        return Verdict(False, f"{STAY}{best_text}, {single} {_text(single.time)}: the ranges over seeds overlap{tail}.")
    return Verdict(
        True, f"{WORTH}{best_text}; {single} needed {_text(single.time)}, {_ratio(single.time, best.time)}{tail}."
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
    return (
        "a single process"
        if group.global_batch_of == 1
        else f"a single process with the global batch (×{group.global_batch_of})"
    )


def _implausible(distributed: Sequence[Group], baselines: Baselines) -> str:
    """Return a caveat for an implausible speed-up, which means that the baseline was measured too slow."""
    speed_ups = [(group.median(lambda record: speed_up(record, baselines)) or 0.0, group) for group in distributed]
    ratio, group = max(speed_ups, key=lambda pair: pair[0] / pair[1].workers, default=(0.0, None))
    if group is None or ratio < PLAUSIBLE * group.workers:
        return ""
    return (
        f"{_name(group)} had {formatting.figure(ratio, 2)} times the samples per second of a single process, more than "
        f"linear speed-up. Its own threads or other programs may have slowed the single process down; "
        "try --threads 1 on an idle machine."
    )


def _cores(groups: Sequence[Group]) -> str:
    """Return a caveat if the workers shared the cores that the single process had."""
    single = next((record for group in groups if group.single_process for record in group.records), None)
    sharing = [group for group in groups if single and not group.single_process and _shares_cores(group, single)]
    if not sharing or single is None:
        return ""
    workers = " or ".join(str(count) for count in sorted({group.workers for group in sharing}))
    cores = formatting.plural(single["cores"], "core")
    return f"The {workers} workers shared the {cores} of one machine; on separate machines the result may differ."


def _shares_cores(group: Group, single: Record) -> bool:
    run: Record = next(iter(group.records), {})
    cores, threads = run.get("cores"), run.get("threads")
    if group.workers == 1 or not (cores and threads and single["cores"] and single["threads"]):
        return False
    cores_used = group.workers * threads
    return bool(cores_used > cores or min(cores, cores_used) <= single["threads"])


def _seeds(groups: Sequence[Group]) -> str:
    seeds = {record["seed"] for group in groups for record in group.asked}
    if len(seeds) > 1:
        return f"Medians over {len(seeds)} seeds, ranges in brackets."
    return "Measured with one seed: the difference may be due to chance."


def _failed(groups: Sequence[Group]) -> str:
    failed = ", ".join(_name(group) for group in groups if not group.complete)
    return f"Excluded, because a run failed: {failed}." if failed else ""
