"""Verdict of a comparison: whether distributed training paid off, in one sentence, with its caveats.

Rules
- Never are seconds or metrics of different work compared. With a target, the training time to the target counts, and
  only recipes that reached it on every seed compete. If no run reached it, and without a target, runs are compared by
  the samples that they trained on.
- The baseline of a recipe is the better of the runs in a single process, with the script's batch and with the global
  batch, that trained on as many samples as the recipe: their training times are compared. A script that counts its own
  steps trains on N times the samples with N workers; only the single process with the global batch trains on as many.
- If no baseline trained on as many samples, the baseline is the single process with the global batch, and samples per
  second are compared.
- Runs compete if their metric after equal numbers of samples is as good as that of the best baseline, within a
  tolerance. Without evaluations near equal numbers of samples there is no verdict.
- Faster means by more than `TIE`, and with several seeds also that the ranges do not overlap.
- A speed-up of more than `PLAUSIBLE` times n on n workers is not believed.
- A recipe with a failed run is not a candidate.
- Caveats name missing evidence: a single seed, a missing `evaluate`, shared cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.report import formatting, metrics
from stretto.report.aggregation import Baselines, Group, Measure, Spread, grouped
from stretto.report.equal_samples import are_same, value_at
from stretto.report.run_record import Record
from stretto.report.tables import metric_names, reached, speed_up
from stretto.report.target import Target

PLAUSIBLE = 1.1
"""Largest plausible speed-up per worker; more means that other load slowed the run in a single process."""

TIE = 0.05
"""Relative difference below which two times count as equal."""

EVALUATIONS = 20
"""Number of evaluations that `evaluate_every` is proposed for."""

STAY = "Stay on one machine: "
WORTH = "Worth it: "
DOUBTFUL = "Faster, but hard to believe: "
NOT_SCRIPT = "Faster with the global batch only: "
FASTER = "Faster, but quality is unknown: "
UNKNOWN = "No verdict: "

TO_TARGET = "training time to the target"
TIME = "training time for equal samples at equal quality"
PACE = "samples per second at equal quality"
QUALITY = "metric at equal samples"
SPEED = "training time for equal samples at unknown quality"


@dataclass(frozen=True)
class Side:
    """A run of those that a verdict compares; medians over seeds. `seconds` is the training time of all `samples`."""

    run: str
    workers: int
    samples: float | None
    seconds: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Verdict:
    """Verdict in one sentence, with caveats. `worth` is None if the runs do not decide it.

    `by` is what was compared, None without a verdict, and `sides` are the baseline and the best distributed run.
    """

    worth: bool | None
    sentence: str
    caveats: tuple[str, ...] = ()
    by: str | None = None
    sides: tuple[Side, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.caveats))

    def noting(self, *caveats: str) -> Verdict:
        """Return the verdict with further caveats; empty texts are skipped."""
        return replace(self, caveats=(*self.caveats, *(text for text in caveats if text)))


def verdict(records: Sequence[Record], target: Target | None = None) -> Verdict:
    """Return the verdict of a comparison; `reached` of the records refers to `target`."""
    groups = grouped(records)
    singles = [group for group in groups if group.single_process and group.complete]
    distributed = [group for group in groups if group.workers > 1 and group.complete]
    judged = _impossible(groups, singles, distributed) or _judge(singles, distributed, target)
    implausible = _implausible(distributed, Baselines(records))
    if judged.worth and implausible:
        judged = replace(judged, worth=None, sentence=judged.sentence.replace(WORTH, DOUBTFUL, 1))
    return judged.noting(implausible, _cores(groups), _failed(groups), _seeds(groups))


def _impossible(groups: Sequence[Group], singles: Sequence[Group], distributed: Sequence[Group]) -> Verdict | None:
    if not groups:
        return Verdict(None, "No run has finished yet.")
    if all(group.workers == 1 for group in groups):
        return Verdict(None, UNKNOWN + "there is no distributed run.")
    if not singles:
        return Verdict(None, UNKNOWN + "the runs in a single process failed, so there is no baseline.")
    return None if distributed else Verdict(None, UNKNOWN + "every distributed recipe failed in at least one run.")


def _judge(singles: Sequence[Group], distributed: Sequence[Group], target: Target | None) -> Verdict:
    if target is None:
        return _by_samples(singles, distributed, None)
    unreached = f"No recipe and no single process reached {target} on every seed."
    return _by_target(singles, distributed, target) or _by_samples(singles, distributed, target).noting(unreached)


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


def _samples(group: Group) -> float:
    return group.median(lambda record: record["samples"]) or 0.0


# Time to the target


def _to_target(record: Record) -> float | None:
    return reached(record, "seconds")


def _by_target(singles: Sequence[Group], distributed: Sequence[Group], target: Target) -> Verdict | None:
    """Return the verdict by the time to the target, or None if no group reached it on every seed."""
    single, best = _fastest(singles, _to_target), _fastest(distributed, _to_target)
    if single and best:
        judged = _by_times(single, best, TO_TARGET, f"reached {target} in", "the fastest distributed run")
        return judged.noting(_ended_sooner(singles, best, target) if judged.worth else "")
    winner = single or best
    return _only_one_reached(winner, distributed if single else singles, target) if winner else None


def _only_one_reached(winner: Timed, others: Sequence[Group], target: Target) -> Verdict:
    """Return the verdict if one side reached the target: none if the other side trained on fewer samples than that."""
    longest, needed = max(others, key=_samples), winner.group.median(lambda record: reached(record, "samples")) or 0.0
    is_single, trained = winner.group.single_process, f"{formatting.count(_samples(longest))} samples"
    sides = _sides(winner.group, longest) if is_single else _sides(longest, winner.group)
    reached_it = f"{winner} reached {target} in {_text(winner.time)}, after {formatting.count(needed)} samples"
    if needed > _samples(longest) and not are_same(needed, _samples(longest)):
        ended = f"the {'distributed runs' if is_single else 'runs in a single process'} ended sooner, after {trained}"
        return Verdict(None, f"{UNKNOWN}{reached_it}; {ended} at most.", sides=sides)
    missed = "no distributed run reached it" if is_single else "a single process did not"
    on_every_seed = "" if len(winner.group.asked) == 1 else " on every seed"
    sentence = f"{STAY if is_single else WORTH}{reached_it}; {missed}{on_every_seed}, in up to {trained}."
    return Verdict(not is_single, sentence, by=TO_TARGET, sides=sides)


def _ended_sooner(singles: Sequence[Group], best: Timed, target: Target) -> str:
    """Return a caveat that names a baseline that ended, without the target, sooner than the winner reached it."""
    missed = (group for group in singles if _fastest([group], _to_target) is None)
    short = next((group for group in missed if (group.median(_seconds) or 0.0) < best.time.median), None)
    if short is None:
        return ""
    return f"Not compared: {_name(short)} ended sooner, without {target}, after {_samples(short):,.0f} samples."


# Metrics and times after equal numbers of samples


@dataclass(frozen=True)
class _Pair:
    """A distributed run and its baseline, after equal numbers of `samples`.

    `is_same` is True if both trained on that number in all, so that their training times are those of equal work; else
    times are those of the number at the mean speed of a run. `required` is the metric of the best baseline; the fastest
    of those that are as good is `single`. `is_good` is None if a metric is unknown at that number.
    """

    run: Timed
    single: Timed
    samples: float
    is_same: bool
    value: float | None
    single_value: float | None
    required: float | None
    is_good: bool | None

    @property
    def gain(self) -> float:
        """Time of the baseline over that of the distributed run."""
        return self.single.time.median / self.run.time.median if self.run.time.median > 0 else math.inf

    @property
    def gap(self) -> float:
        """Distance of the metric of the distributed run from the required one."""
        return math.inf if self.value is None or self.required is None else abs(self.value - self.required)


def _by_samples(singles: Sequence[Group], distributed: Sequence[Group], target: Target | None) -> Verdict:
    """Return the verdict by the times for equal work, among runs whose metric is as good as that of their baseline."""
    names = metric_names([record for group in (*singles, *distributed) for record in group.records])
    metric = target.metric if target and target.metric in names else metrics.main_metric(names)
    pairs = [pair for group in distributed if (pair := _paired(group, singles, metric))]
    if not pairs:
        return Verdict(None, UNKNOWN + "the runs left no training time in their logs.")
    good = [pair for pair in pairs if pair.is_good]
    unknown = [pair for pair in pairs if pair.is_good is None]
    if metric is None or (unknown and not good):
        return _of_unknown_quality(unknown, singles, metric)
    best = max(good, key=lambda pair: pair.gain) if good else min(pairs, key=lambda pair: pair.gap)
    judged = _as_good(best, metric) if good else _none_as_good(best, metric)
    if good:
        worse = _faster_but_worse([pair for pair in pairs if pair.is_good is False], metric)
        unmeasured = [f"Not compared, without evaluations near equal samples: {pair.run}." for pair in unknown]
        judged = judged.noting(worse, *unmeasured)
    return _beside_script_batch(judged, best, singles, metric, target)


def _paired(run: Group, singles: Sequence[Group], metric: str | None) -> _Pair | None:
    """Return a run with its baseline: the fastest of those that are as good as the best; None without times."""
    own, name = _samples(run), metric or ""
    equal = [group for group in singles if are_same(_samples(group), own)]
    rivals = equal or [group for group in singles if group.global_batch_of == run.workers] or list(singles[:1])
    samples = own if equal else min(own, _samples(rivals[0]))

    def value(group: Group) -> float | None:
        return group.median(lambda record: value_at(record, name, record["samples"] if equal else samples))

    def seconds(record: Record) -> float | None:
        speed = record["samples_per_second"]
        return _seconds(record) if equal else samples / speed if speed else None

    measured = [group for group in rivals if value(group) is not None]
    bar = max(measured, key=lambda group: (value(group) or 0.0) * metrics.direction(name), default=None)
    required = value(bar) if bar else None
    as_good = [group for group in measured if metrics.as_good(name, value(group), required)]
    timed, single = _fastest([run], seconds), _fastest(as_good or rivals, seconds)
    if timed is None or single is None:
        return None
    is_known = bar is not None and (value(run) is not None or are_same(samples, own))
    is_good = metrics.as_good(name, value(run), required) if is_known else None
    return _Pair(timed, single, samples, bool(equal), value(run), value(single.group), required, is_good)


def _as_good(pair: _Pair, metric: str) -> Verdict:
    """Return the verdict by the times of a run and a baseline of equal quality."""
    judged = _by_work(pair, "the fastest distributed run of equal quality", TIME if pair.is_same else PACE)
    own, single = (formatting.figure(value, 4) for value in (pair.value, pair.single_value))
    tolerance = f"within {metrics.tolerance_text(metric, pair.required or 0.0)} counts as equal"
    when = "Final" if pair.is_same else f"After {formatting.count(pair.samples)} samples,"
    return judged.noting(f"{when} {metric}: {own}, in a single process {single}; {tolerance}.")


def _none_as_good(nearest: _Pair, metric: str) -> Verdict:
    """Return the verdict by the metric after equal samples, if no distributed run came near its baseline."""
    had, own = (formatting.figure(value, 4) for value in (nearest.single_value, nearest.value))
    near = f"within {metrics.tolerance_text(metric, nearest.required or 0.0)} of it"
    single = f"{nearest.single} had {metric} {had} after {formatting.count(nearest.samples)} samples"
    nearest_text = f"; the nearest, {nearest.run}, had {own}" if nearest.value is not None else ""
    sentence = f"{STAY}{single}, and after as many no distributed run was {near}{nearest_text}."
    return Verdict(False, sentence, by=QUALITY, sides=_sides(nearest.single.group, nearest.run.group))


def _faster_but_worse(worse: Sequence[_Pair], metric: str) -> str:
    """Return a caveat that names the fastest run that was faster than its baseline but of worse quality."""
    best = max(worse, key=lambda pair: pair.gain, default=None)
    if best is None or best.gain <= 1:
        return ""
    had = f"{metric} {formatting.figure(best.value, 4)} after {formatting.count(best.samples)} samples"
    return f"Faster, but not as good: {best.run} ({had})."


def _beside_script_batch(
    judged: Verdict, pair: _Pair, singles: Sequence[Group], metric: str, target: Target | None
) -> Verdict:
    """Return a verdict with a caveat on the single process with the script's batch, if it trained on other samples.

    The verdict is open if that process had its final metric sooner than the distributed run.
    """
    script, run, direction = singles[0], pair.run.group, metrics.direction(metric)
    if script.global_batch_of > 1 or script is pair.single.group or are_same(_samples(script), _samples(run)):
        return judged
    text = f"The single process with the script's batch trained on {formatting.count(_samples(script))} samples"
    final, seconds = script.median(lambda record: record["metrics"].get(metric)), script.median(_seconds)
    if final is None or seconds is None or direction == 0 or not all(one.get("evaluations") for one in run.records):
        return judged.noting(f"{text}.")
    goal = Target(metric, ">=" if direction > 0 else "<=", final)
    time = run.median(lambda record: _seconds_to(goal, record))
    had = f"{metric} {formatting.figure(final, 4)} after {formatting.seconds(seconds)}"
    own = "was not evaluated before it had that" if time is None else f"had that after {formatting.seconds(time)}"
    own = "did not have that" if time == math.inf else own
    easier = f"{metric}{goal.comparison}{final - 0.001 * direction * abs(final):.4g}"
    hint = "" if target else f' Compare the times to such a value with --target "{easier}".'
    if judged.worth and time is not None and time > seconds:
        judged = replace(judged, worth=None, sentence=judged.sentence.replace(WORTH, NOT_SCRIPT, 1))
    return judged.noting(f"{text}: {had}; {_name(run)} {own}.{hint}")


def _seconds_to(goal: Target, record: Record) -> float | None:
    """Return the training time to a goal, interpolated between evaluations; infinite if the run did not reach it.

    None if the first evaluation is the one that satisfies the goal.
    """
    evaluations = record["evaluations"]
    first = next((place for place, seen in enumerate(evaluations) if goal.satisfied(seen["metrics"])), None)
    if not first:
        return math.inf if first is None else None
    before, after = evaluations[first - 1 : first + 1]
    low, high = (seen["metrics"].get(goal.metric) for seen in (before, after))
    share = 1.0 if low is None or high == low else (goal.number - low) / (high - low)
    seconds: float = before["training_s"] + share * (after["training_s"] - before["training_s"])
    return seconds


def _of_unknown_quality(unknown: Sequence[_Pair], singles: Sequence[Group], metric: str | None) -> Verdict:
    """Return the verdict without metrics: by speed, if all runs trained on as many samples, which is never positive."""
    best = max(unknown, key=lambda pair: pair.gain)
    if all(pair.is_same for pair in unknown) and are_same(_samples(singles[0]), _samples(best.run.group)):
        cause = "the runs have no evaluations" if metric is None else f"the single process has no finite {metric}"
        judged = _by_work(best, "the fastest distributed run", SPEED)
        sentence = judged.sentence.replace(WORTH, FASTER, 1)
        judged = replace(judged, worth=None if judged.worth else False, sentence=sentence)
        return judged.noting(f"Quality was not measured: {cause}.")
    run, single = best.run.group, singles[0]
    trained = f"{_name(run)} trained on {formatting.count(_samples(run))} samples, {_name(single)} on "
    steps = run.median(lambda record: record["steps"]) or 0
    every = max(1, round(steps / EVALUATIONS))
    add = f"`evaluate_every={every}`"
    return Verdict(
        None,
        f"{UNKNOWN}{trained}{formatting.count(_samples(single))}, without evaluations near equal samples.",
        (
            f"Give stretto.distribute {add if metric else f'`evaluate=` and {add}'}; transformers.TrainingArguments "
            f'`eval_strategy="steps", eval_steps={every}`; Lightning\'s Trainer `val_check_interval={every}, '
            "check_val_every_n_epoch=None`.",
        ),
        sides=_sides(single, run),
    )


def _by_work(pair: _Pair, rival: str, by: str) -> Verdict:
    """Return the verdict by the training times for equal samples, or else by samples per second."""
    if pair.is_same:
        tail = f" for the same {formatting.count(pair.samples)} samples"
        return _by_times(pair.single, pair.run, by, "took", rival, tail)
    tail, verb = " for as many samples", "trained on"
    return _by_times(pair.single, pair.run, by, verb, rival, tail, needed=verb, work=pair.samples)


def _by_times(
    single: Timed,
    best: Timed,
    by: str,
    verb: str,
    rival: str,
    tail: str = "",
    *,
    needed: str = "needed",
    work: float | None = None,
) -> Verdict:
    """Return the verdict on the fastest distributed group and the fastest baseline.

    With the number of samples of the `work` the sentence has samples per second in place of times.
    """
    single_time, best_time = _text(single.time, work), _text(best.time, work)
    if best.time.median >= single.time.median * (1 + TIE):
        ratio = _ratio(best.time, single.time)
        other = f"{rival}, {best}, {needed} {best_time}, {ratio}"
        worth, sentence = False, f"{STAY}{single} {verb} {single_time}; {other}"
    elif best.time.median > single.time.median * (1 - TIE):
        worth, sentence = False, f"{STAY}{best} {verb} {best_time}, {single} {single_time}: no relevant difference"
    elif best.time.high >= single.time.low:
        overlap = "the ranges over seeds overlap"
        worth, sentence = False, f"{STAY}{best} {verb} {best_time}, {single} {single_time}: {overlap}"
    else:
        ratio = _ratio(single.time, best.time)
        worth, sentence = True, f"{WORTH}{best} {verb} {best_time}; {single} {needed} {single_time}, {ratio}"
    return Verdict(worth, f"{sentence}{tail}.", by=by, sides=_sides(single.group, best.group))


def _sides(single: Group, run: Group) -> tuple[Side, ...]:
    return tuple(
        Side(
            group.label,
            group.workers,
            group.median(lambda record: record["samples"]),
            group.median(_seconds),
            group.median(lambda record: record["samples_per_second"]),
        )
        for group in (single, run)
    )


def _ratio(long: Spread, short: Spread) -> str:
    if short.median <= 0:
        return "many times as long"
    return f"{formatting.figure(long.median / short.median, 2)} times as long"


def _text(time: Spread, work: float | None = None) -> str:
    if work is None:
        median, low, high = (formatting.seconds(value) for value in (time.median, time.low, time.high))
    else:
        speeds = (work / value for value in (time.median, time.high, time.low))
        median, low, high = (f"{formatting.count(value)} samples/s" for value in speeds)
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
