"""The verdict claims only measured results."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.report.target import Target
from stretto.report.verdict import (
    DOUBTFUL,
    FASTER,
    NOT_SCRIPT,
    PACE,
    QUALITY,
    STAY,
    TIME,
    TO_TARGET,
    UNKNOWN,
    WORTH,
    Verdict,
    verdict,
)

TARGET = Target("acc", ">=", 0.9)
Run = dict[str, Any]


def run(recipe: str, seconds: float | None, acc: float | None = 0.95, **more: Any) -> Run:
    workers = more.pop("workers", 1 if recipe.startswith("single process") else 4)
    join = more.pop("global_batch_of", 4 if recipe == "single process (global batch)" else 1)
    reached = more.pop("reached", None)
    samples = more.pop("samples", 1000)
    rate = samples / seconds if seconds else None
    known: Run = {
        "recipe": recipe,
        "workers": workers,
        "global_batch_of": join,
        "seed": 0,
        "failed": None,
        "seconds": seconds,
    }
    known |= {"metrics": {} if acc is None else {"acc": acc}, "threads": 1, "cores": 64, "samples_per_second": rate}
    known |= {"reached": {"seconds": reached, "samples": 1} if reached else None, "folder": recipe}
    known |= {"samples": samples, "steps": 100, "evaluations": []}
    return known | more


def judge(*runs: Run, target: Target | None = None) -> Verdict:
    return verdict(runs, target)


ALONE = run("single process", 10.0, reached=8.0)
JOINED = run("single process (global batch)", 9.0, reached=9.5)


def test_distributed_wins_the_race_to_the_target() -> None:
    judged = judge(ALONE, JOINED, run("a()", 4.0, reached=3.0), run("b()", 3.0), target=TARGET)
    assert judged.worth is True
    assert judged.sentence == (
        f"{WORTH}a() on 4 workers reached acc>=0.9 in 3.00 s; a single process needed 8.00 s, 2.7 times as long."
    )


def test_distributed_loses_the_race_to_the_target() -> None:
    judged = judge(ALONE, JOINED, run("a()", 4.0, reached=16.0), target=TARGET)
    assert judged.worth is False
    assert judged.sentence.startswith(f"{STAY}a single process reached acc>=0.9 in 8.00 s")
    assert "needed 16.0 s, 2.0 times as long" in judged.sentence


def test_the_global_batch_in_a_single_process_is_a_baseline() -> None:
    fast = run("single process (global batch)", 3.0, reached=2.0)
    judged = judge(ALONE, fast, run("a()", 4.0, reached=3.0), target=TARGET)
    assert judged.worth is False
    assert "a single process with the global batch (×4) reached acc>=0.9 in 2.00 s" in judged.sentence


@pytest.mark.parametrize("seconds", [7.7, 8.0, 8.3])
def test_a_tie_does_not_win(seconds: float) -> None:
    judged = judge(ALONE, JOINED, run("a()", 10.0, reached=seconds), target=TARGET)
    assert judged.worth is False
    assert "no relevant difference" in judged.sentence


def test_a_target_that_only_one_side_reached_decides() -> None:
    missed = run("single process", 10.0), run("single process (global batch)", 9.0)
    assert judge(*missed, run("a()", 20.0, reached=19.0), target=TARGET).worth is True
    judged = judge(ALONE, JOINED, run("a()", 1.0), target=TARGET)
    assert judged.worth is False
    assert "no distributed run reached it" in judged.sentence


def test_an_unreached_target_falls_back_to_time_for_the_same_samples() -> None:
    judged = judge(
        run("single process", 10.0), run("single process (global batch)", 9.0), run("a()", 3.0), target=TARGET
    )
    assert judged.worth is True
    assert judged.sentence.endswith("3.0 times as long for the same 1,000 samples.")
    assert "No recipe and no single process reached acc>=0.9 on every seed." in str(judged)


def test_a_faster_run_with_a_worse_model_does_not_win() -> None:
    judged = judge(run("single process", 10.0, 0.95), run("a()", 3.0, 0.80))
    assert judged.worth is False
    assert "no distributed run was within 0.01 of it" in judged.sentence
    assert "0.8000" in judged.sentence


def test_a_fast_but_worse_run_is_named_beside_the_winner() -> None:
    judged = judge(run("single process", 10.0, 0.95), run("a()", 5.0, 0.951), run("b()", 3.0, 0.80))
    assert judged.sentence.startswith(f"{WORTH}a() on 4 workers took 5.00 s")
    assert "not as good: b() on 4 workers" in str(judged)


def test_less_is_better_for_a_loss() -> None:
    def loss(recipe: str, seconds: float, value: float) -> Run:
        return run(recipe, seconds, metrics={"val_loss": value})

    assert judge(loss("single process", 10.0, 1.0), loss("a()", 3.0, 0.5)).worth is True
    assert judge(loss("single process", 10.0, 1.0), loss("a()", 3.0, 1.5)).worth is False


def test_a_metric_whose_direction_is_unknown_must_come_near() -> None:
    def odd(recipe: str, seconds: float, value: float) -> Run:
        return run(recipe, seconds, metrics={"wobble": value})

    assert judge(odd("single process", 10.0, 1.0), odd("a()", 3.0, 1.01)).worth is True
    assert judge(odd("single process", 10.0, 1.0), odd("a()", 3.0, 2.0)).worth is False
    assert judge(odd("single process", 10.0, 1.0), odd("a()", 3.0, 0.5)).worth is False


def test_without_evaluation_speed_is_not_sufficient() -> None:
    judged = judge(run("single process", 10.0, None), run("a()", 3.0, None))
    assert judged.worth is None
    assert judged.sentence.startswith(FASTER)
    assert "Quality was not measured" in str(judged)
    assert judge(run("single process", 3.0, None), run("a()", 10.0, None)).worth is False


def test_the_number_of_seeds_is_a_caveat() -> None:
    assert "one seed" in str(judge(ALONE, run("a()", 3.0)))
    judged = judge(
        *(run(name, s, seed=seed) for seed in range(3) for name, s in (("single process", 10.0), ("a()", 3.0)))
    )
    assert "3 seeds" in str(judged)
    assert "one seed" not in str(judged)


def test_overlapping_ranges_do_not_win() -> None:
    alone = [run("single process", seconds, seed=seed) for seed, seconds in enumerate((9.0, 10.0, 11.0))]
    other = [run("a()", seconds, seed=seed) for seed, seconds in enumerate((5.0, 8.0, 9.5))]
    judged = judge(*alone, *other)
    assert judged.worth is False
    assert "ranges over seeds overlap" in judged.sentence
    assert "8.00 s (5.00 s to 9.50 s)" in judged.sentence


def test_a_target_reached_on_some_seeds_only_is_not_reached() -> None:
    alone = [run("single process", 10.0, seed=seed, reached=8.0) for seed in range(2)]
    other = [run("a()", 10.0, seed=0, reached=1.0), run("a()", 10.0, seed=1)]
    assert judge(*alone, *other, target=TARGET).worth is False


def test_a_recipe_with_a_failed_run_is_excluded_and_named() -> None:
    judged = judge(ALONE, run("a()", 1.0, failed="boom"), run("b()", 4.0))
    assert judged.sentence.startswith(f"{WORTH}b()")
    assert "Excluded, because a run failed: a() on 4 workers." in str(judged)


def test_a_recipe_on_one_worker_is_not_distributed() -> None:
    one = run("a()", 1.0, workers=1)
    assert judge(run("single process", 10.0), one).sentence.startswith(UNKNOWN)
    assert "b() on 4 workers" in judge(run("single process", 10.0), one, run("b()", 4.0)).sentence


def test_without_one_side_there_is_no_verdict() -> None:
    for runs in ([run("single process", 1.0)], [run("single process", 1.0, failed="x"), run("a()", 1.0)]):
        assert judge(*runs).worth is None
        assert judge(*runs).sentence.startswith(UNKNOWN)
    assert judge(run("single process", 1.0), run("a()", 1.0, failed="x")).worth is None
    assert judge(run("single process", None), run("a()", None)).worth is None


@pytest.mark.parametrize(
    ("cores", "alone_threads", "threads", "said"),
    [(2, 2, 1, True), (4, 4, 1, True), (2, 1, 1, True), (8, 1, 1, False), (8, 2, 2, False), (None, 1, 1, False)],
)
def test_shared_cores_are_a_caveat(cores: int | None, alone_threads: int, threads: int, said: bool) -> None:
    alone = run("single process", 5.0, cores=cores, threads=alone_threads)
    assert ("shared" in str(judge(alone, run("a()", 5.0, cores=cores, threads=threads)))) is said


def test_an_implausible_speed_up_is_doubted() -> None:
    judged = judge(run("single process", 10.0), run("a()", 1.0))
    assert judged.worth is None
    assert judged.sentence.startswith(DOUBTFUL)
    assert "more than linear speed-up" in str(judged)


def test_the_best_number_of_workers_is_named() -> None:
    judged = judge(run("single process", 10.0), run("a()", 6.0, workers=2), run("a()", 3.0, workers=4))
    assert "a() on 4 workers" in judged.sentence


UNEQUAL = {"staleness": {"mean": 3.0, "max": 9, "histogram": {}}, "samples_by_worker": [600, 200, 100, 100]}


def test_an_asynchronous_recipe_competes_like_any_other() -> None:
    judged = judge(ALONE, JOINED, run("async_sgd()", 4.0, **UNEQUAL), run("allreduce()", 8.0))
    assert judged.worth is True
    assert judged.sentence.startswith(f"{WORTH}async_sgd() on 4 workers took 4.00 s")
    worse = judge(run("single process", 10.0, 0.95), run("async_sgd()", 3.0, 0.80, **UNEQUAL))
    assert worse.worth is False
    assert judge(run("single process", 10.0), run("async_sgd()", 1.0, **UNEQUAL)).sentence.startswith(DOUBTFUL)


def test_an_asynchronous_recipe_races_to_the_target() -> None:
    judged = judge(ALONE, JOINED, run("async_sgd()", 4.0, reached=2.0, **UNEQUAL), run("a()", 4.0), target=TARGET)
    assert judged.sentence.startswith(f"{WORTH}async_sgd() on 4 workers reached acc>=0.9 in 2.00 s")


# Scripts that count their own steps train on N times the samples with N workers


def evaluations(curve: dict[int, float], seconds_a_sample: float, metric: str = "acc") -> dict[str, Any]:
    """Return the fields of a record with this metric after these numbers of samples."""
    seen = [
        {"samples": samples, "training_s": seconds_a_sample * samples, "metrics": {metric: value}}
        for samples, value in curve.items()
    ]
    return {"evaluations": seen, "metrics": {metric: list(curve.values())[-1]}, "samples": list(curve)[-1]}


def counted(
    recipe: str, curve: dict[int, float], seconds_a_sample: float, metric: str = "acc", target: Target | None = None
) -> Run:
    """Return a record of a run with these evaluations and a constant speed."""
    fields = evaluations(curve, seconds_a_sample, metric)
    reached = target.reached(fields["evaluations"]) if target else None
    return run(recipe, seconds_a_sample * fields["samples"], **fields) | {"reached": reached}


def learning(samples: int, every: int, efficiency: float = 1.0) -> dict[int, float]:
    """Return an accuracy that rises with the samples."""
    return {at: 1 - 100 / (100 + efficiency * at) for at in range(every, samples + 1, every)}


GLOBAL = "single process (global batch)"


def test_with_unequal_samples_the_baseline_is_the_global_batch() -> None:
    script = counted("single process", {500: 0.6, 1000: 0.7}, 0.001)
    whole = counted(GLOBAL, {2000: 0.8, 4000: 0.9}, 0.002)
    judged = judge(script, whole, counted("a()", {1000: 0.6, 2000: 0.8, 4000: 0.9}, 0.001))
    assert judged.worth is None  # the script's batch had its final metric sooner
    slower_script = counted("single process", {500: 0.6, 1000: 0.7}, 0.003)
    judged = judge(slower_script, whole, counted("a()", {1000: 0.6, 2000: 0.8, 4000: 0.9}, 0.001))
    assert judged.sentence == (
        f"{WORTH}a() on 4 workers took 4.00 s; a single process with the global batch (×4) needed 8.00 s, "
        "2.0 times as long for the same 4,000 samples."
    )
    assert [side.samples for side in judged.sides] == [4000, 4000]
    assert "The single process with the script's batch trained on 1,000 samples: acc 0.7000 after 3.00 s" in str(judged)


def test_the_script_that_had_its_metric_sooner_is_in_the_way_of_a_verdict() -> None:
    script, whole = (
        counted("single process", learning(1000, 100, 4), 0.001),
        counted(GLOBAL, learning(4000, 400), 0.002),
    )
    judged = judge(script, whole, counted("a()", learning(4000, 400), 0.001))
    assert judged.worth is None
    assert judged.sentence.startswith(NOT_SCRIPT)
    assert "acc 0.9756 after 1.00 s; a() on 4 workers had that after 4.00 s" in str(judged)
    coarse = judge(script, whole, counted("a()", {4000: learning(4000, 400)[4000]}, 0.001))
    assert coarse.sentence.startswith(WORTH)
    assert "a() on 4 workers was not evaluated before it had that." in str(coarse)
    assert '--target "acc>=0.9746"' in str(judged)


@pytest.mark.parametrize("factor", [2, 3, 8])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0, 8.0])
def test_no_verdict_has_seconds_of_different_work(factor: int, speed: float) -> None:
    script = counted("single process", learning(1000, 100), 0.001)
    judged = judge(script, counted("a()", learning(1000 * factor, 100), 0.001 / speed, metric="acc"))
    assert judged.by == PACE
    assert "samples/s" in judged.sentence
    assert " s;" not in judged.sentence and " s," not in judged.sentence
    assert judged.worth is (None if speed > 4.4 else speed > 1)


@pytest.mark.parametrize("order", [1, -1])
def test_equal_samples_have_one_verdict_whatever_the_order_of_the_runs(order: int) -> None:
    runs = [counted("single process", learning(1000, 100), 0.002), counted("a()", learning(1000, 100), 0.001)]
    runs.append(counted("b()", learning(1000, 100), 0.003))
    judged = judge(*runs[::order])
    assert (judged.worth, judged.by) == (True, TIME)
    assert judged.sentence.endswith("2.0 times as long for the same 1,000 samples.")


@pytest.mark.parametrize(
    ("evaluated_at", "is_near"),
    [
        ((1000, 2000), True),
        ((250, 500, 750, 1000, 1250), True),
        ((800, 1250), True),
        ((750, 1200, 2000), True),
        ((500, 2000), False),
        ((700, 1200), False),
        ((950, 1300), False),
        ((2000,), False),
    ],
)
def test_a_metric_is_interpolated_between_evaluations_near_equal_samples(
    evaluated_at: tuple[int, ...], is_near: bool
) -> None:
    script = counted("single process", {1000: 0.5}, 0.001)
    judged = judge(script, counted("a()", {at: at / 2000 for at in evaluated_at}, 0.0005))
    if is_near:
        assert judged.worth is True
        assert "After 1,000 samples, acc: 0.5000, in a single process 0.5000" in str(judged)
    else:
        assert judged.worth is None
        assert judged.sentence.startswith(UNKNOWN)
        assert "`evaluate_every=5`" in str(judged)


def test_unequal_samples_without_evaluations_have_no_verdict() -> None:
    script, whole = run("single process", 1.0, None), run(GLOBAL, 4.0, None, samples=4000)
    judged = judge(script, whole, run("a()", 2.0, None, samples=4000))
    assert judged.worth is None
    assert judged.by is None
    assert judged.sentence == (
        f"{UNKNOWN}a() on 4 workers trained on 4,000 samples, a single process on 1,000, "
        "without evaluations near equal samples."
    )
    assert judged.caveats[0].startswith("Give stretto.distribute `evaluate=` and `evaluate_every=5`; ")
    assert 'eval_strategy="steps", eval_steps=5' in judged.caveats[0]


def test_a_worse_metric_after_equal_samples_does_not_win_by_more_samples() -> None:
    script = counted("single process", learning(1000, 100), 0.001)
    judged = judge(script, counted("a()", learning(4000, 400, efficiency=0.3), 0.0005))
    assert (judged.worth, judged.by) == (False, QUALITY)
    assert "and after as many no distributed run was within 0.01 of it" in judged.sentence


def test_each_number_of_workers_has_the_baseline_of_its_own_global_batch() -> None:
    script = counted("single process", learning(1000, 100), 0.005)
    wholes = [
        counted(GLOBAL, learning(1000 * n, 100 * n), 0.004) | {"global_batch_of": n, "folder": f"whole {n}"}
        for n in (2, 4)
    ]
    runs = [counted("a()", learning(1000 * n, 100 * n), 0.006 / n) | {"workers": n} for n in (2, 4)]
    judged = judge(script, *wholes, *runs)
    assert judged.sentence.startswith(
        f"{WORTH}a() on 4 workers took 6.00 s; a single process with the global batch (×4)"
    )
    assert judged.sentence.endswith("2.7 times as long for the same 4,000 samples.")


def test_a_side_that_trained_on_too_few_samples_has_not_missed_the_target() -> None:
    script = counted("single process", learning(500, 100), 0.001, target=TARGET)
    far = counted("a()", learning(4000, 400), 0.001, target=TARGET)
    judged = judge(script, far, target=TARGET)
    assert judged.worth is None
    assert judged.sentence == (
        f"{UNKNOWN}a() on 4 workers reached acc>=0.9 in 1.20 s, after 1,200 samples; "
        "the runs in a single process ended sooner, after 500 samples at most."
    )
    whole = counted(GLOBAL, learning(4000, 400, efficiency=0.1), 0.001, target=TARGET)
    judged = judge(script, whole, far, target=TARGET)
    assert (judged.worth, judged.by) == (True, TO_TARGET)
    assert "a single process did not, in up to 4,000 samples" in judged.sentence
    short = counted("a()", learning(300, 100), 0.001, target=TARGET)
    assert judge(counted("single process", learning(2000, 100), 0.1, target=TARGET), short, target=TARGET).worth is None


def test_a_baseline_that_ended_sooner_than_the_target_was_reached_is_named() -> None:
    script = counted("single process", learning(500, 100), 0.001, target=TARGET)
    whole = counted(GLOBAL, learning(4000, 400), 0.004, target=TARGET)
    judged = judge(script, whole, counted("a()", learning(4000, 400), 0.001, target=TARGET), target=TARGET)
    assert judged.worth is True
    assert "Not compared: a single process ended sooner, without acc>=0.9, after 500 samples." in judged.caveats


def test_without_a_baseline_of_as_many_samples_the_global_batch_is_compared_after_equal_samples() -> None:
    script = counted("single process", learning(1000, 100, 9), 0.001)
    whole = counted(GLOBAL, learning(2000, 200), 0.003)
    judged = judge(script, whole, counted("a()", learning(4000, 400), 0.0015))
    assert judged.by == PACE
    assert judged.sentence.endswith(
        "a() on 4 workers trained on 667 samples/s; a single process with the global batch (×4) trained on "
        "333 samples/s, 2.0 times as long for as many samples."
    )
    assert "After 2,000 samples, acc: 0.9524, in a single process 0.9524" in judged.caveats[0]
