"""Experiment on asynchronous training and a barrier under stragglers, with formulas of K-sync and K-batch-async."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, legend, line, logarithmic, number, panel, percent, rows, ticks
from experiments.runs import Found, Point, distinct, mean, where
from stretto.simulator.compute.speed import Exponential, Pace

WORKERS = 16
SIGMAS = (0.0, 0.5, 1.0, 1.5)
KINDS = {"each step": "lognormal({}, each=step)", "each worker": "lognormal({})"}
SIDES = {"barrier": "allreduce", "asynchronous": f"async_sgd(weight={1 / WORKERS})"}
TARGET = "test_accuracy>=0.93"
ARGS = "--batch 8 --lr 0.4 --samples 2874 --epochs 7"

KS = (1, 2, 4, 8, 16)
STEP_MS = 5.0
ROUNDS = 100
DRAWS = 2000


def grid(quick: bool) -> list[Point]:
    """Return both recipes at each sigma, and each K with exponential speeds and steps of 1 / mu = 5 ms on average."""
    seeds = SEEDS[: 1 if quick else None]
    found = [
        Point(
            {"kind": kind, "sigma": sigma, "side": side},
            WORKERS,
            recipe,
            ARGS,
            seed,
            speeds=speeds.format(sigma),
            target=TARGET,
        )
        for kind, speeds in list(KINDS.items())[: 1 if quick else None]
        for sigma in SIGMAS[:: 3 if quick else 1]
        for side, recipe in SIDES.items()
        for seed in seeds
    ]
    timed = f"--batch 1 --lr 0.001 --epochs 1 --samples {WORKERS * ROUNDS}"
    for k in KS[:: 4 if quick else 1]:
        recipe = f"soft_sync(collect={k})" if k > 1 else "async_sgd"
        found += [Point({"async of": k}, WORKERS, recipe, timed, seed, speeds="exponential") for seed in seeds]
    found += [Point({"sync of": WORKERS}, WORKERS, "allreduce", timed, seed, speeds="exponential") for seed in seeds]
    return found


def harmonic(n: int) -> float:
    """Return H_n = 1 + 1/2 + ... + 1/n."""
    return sum(1 / i for i in range(1, n + 1))


def k_sync_ms(k: int) -> float:
    """Return E[T] = (H_N - H_{N-K}) / mu: the K-th of N exponential times (Dutta et al. 2018)."""
    return STEP_MS * (harmonic(WORKERS) - harmonic(WORKERS - k))


def k_batch_async_ms(k: int) -> float:
    """Return E[T] = K / (N mu): K arrivals of N workers that never wait (Dutta et al. 2018)."""
    return STEP_MS * k / WORKERS


def drawn(quick: bool) -> Found:
    """Return the K-th shortest of the simulator's draws for N workers, in ms: the time of K-sync. No recipe runs it."""
    pace, draws = Pace(Exponential(), WORKERS, seed=0), 100 if quick else DRAWS
    times = np.array([[pace.step_s(w, step, 0.0, STEP_MS) for step in range(draws)] for w in range(WORKERS)])
    return {"k_sync_drawn_ms": {str(k): float(np.sort(times, axis=0)[k - 1].mean()) for k in KS}}


def ms_a_version(points: list[Found], k: int) -> float:
    """Return the virtual milliseconds of an update of the model from K gradients of one sample each."""
    return 1e3 * (mean(points, "seconds") or 0.0) * k / (mean(points, "samples") or 1.0)


def table(found: Found) -> Iterator[str]:
    """Yield both recipes, then the formulas."""
    body = []
    for kind in distinct(found["points"], "kind"):
        for sigma in distinct(found["points"], "sigma"):
            sides = [where(found["points"], {"kind": kind, "sigma": sigma, "side": side}) for side in SIDES]
            times = [mean(one, "seconds_to_target") for one in sides]
            ratio = times[0] / times[1] if times[0] and times[1] else None
            row = [kind, f"{sigma:g}", *(number(one, 2) for one in times), number(ratio, 2)]
            body.append([*row, *(percent(one) for one in sides)])
    head = ["drawn for", "sigma", "barrier: seconds to 93%", "asynchronous", "ratio", "barrier: accuracy at the end"]
    yield from rows([*head, "asynchronous"], body)
    yield ""
    yield f"Milliseconds between steps of the model, {WORKERS} workers whose steps take {STEP_MS:g} ms, exponential:"
    yield ""
    body = []
    for k in KS:
        asynchronous, sync = (where(found["points"], {name: k}) for name in ("async of", "sync of"))
        simulated = [number(ms_a_version(one, k), 3) if one else "" for one in (asynchronous, sync)]
        beside = number(found["beside"]["k_sync_drawn_ms"][str(k)], 3)
        formulas = [number(formula(k), 3) for formula in (k_batch_async_ms, k_sync_ms)]
        body.append([str(k), formulas[0], simulated[0], formulas[1], simulated[1], beside])
    head = ["K", "K-batch-async: K / (N mu)", "simulated", "K-sync: (H_N - H_{N-K}) / mu", "simulated", "draws alone"]
    yield from rows(head, body)


def paint(figure: Figure, found: Found) -> None:
    """Plot times by sigma, and by K."""
    sigmas = distinct(found["points"], "sigma")
    ax = panel(figure, 0, 2, "seconds to 93%", "sigma")
    for place, kind in enumerate(distinct(found["points"], "kind")):
        for side, marker in zip(SIDES, "os", strict=True):
            points = [where(found["points"], {"kind": kind, "sigma": one, "side": side}) for one in sigmas]
            times = [mean(one, "seconds_to_target") for one in points]
            line(ax, sigmas, times, f"{side}, {kind}", 2 * place + (marker == "s"), marker)
    logarithmic(ax)
    ax.set_ylim(bottom=0.02)
    ax.legend(frameon=False, fontsize=7, handlelength=1.4, labelspacing=0.25, loc="lower left")
    ax = panel(figure, 1, 2, "ms between steps of the model", "K")
    for place, (formula, name) in enumerate(((k_sync_ms, "K-sync"), (k_batch_async_ms, "K-batch-async"))):
        line(ax, KS, [formula(k) for k in KS], f"{name}, formula", place, marker="")
    ks = distinct(found["points"], "async of")
    simulated = [ms_a_version(where(found["points"], {"async of": k}), k) for k in ks]
    ax.plot(ks, simulated, color="#222222", ls="", marker="o", ms=3, label="simulated")
    barrier = ms_a_version(where(found["points"], {"sync of": WORKERS}), WORKERS)
    ax.plot([WORKERS], [barrier], color="#222222", ls="", marker="o", ms=3)
    ticks(ax, KS)
    logarithmic(ax)
    legend(ax)


def verdict(found: Found) -> str:
    """Return the growth of the ratio, and the distance of simulated times from the formulas."""
    said, held = [], []
    for kind in distinct(found["points"], "kind"):
        ratios = []
        for sigma in distinct(found["points"], "sigma"):
            sides = [where(found["points"], {"kind": kind, "sigma": sigma, "side": side}) for side in SIDES]
            times = [mean(one, "seconds_to_target") for one in sides]
            ratios.append(times[0] / times[1] if times[0] and times[1] else math.nan)
        held.append(ratios == sorted(ratios))
        sigmas = ", ".join(f"{one:g}" for one in distinct(found["points"], "sigma"))
        told = ", ".join(f"{one:.2f}" for one in ratios)
        said.append(f"drawn for {kind}, asynchronous is {told} times as fast to 93% at sigma {sigmas}")
    off = [
        abs(ms_a_version(where(found["points"], {"async of": k}), k) / k_batch_async_ms(k) - 1)
        for k in distinct(found["points"], "async of")
    ]
    barrier = ms_a_version(where(found["points"], {"sync of": WORKERS}), WORKERS) / k_sync_ms(WORKERS) - 1
    return (
        f"The claim {'holds' if all(held) else 'does not hold throughout'}: {'; '.join(said)}. The simulated times are "
        f"within {max(off):.1%} of K / (N mu), and the barrier's within {abs(barrier):.1%} of H_N / mu."
    )


EXPERIMENT = Experiment(
    name="stragglers",
    title="Asynchronous against a barrier as stragglers get worse",
    claim="The worse the stragglers, the more asynchrony wins; with exponential times a step of K-sync takes "
    "(H_N - H_{N-K}) / mu and one of K-batch-async K / (N mu) (Dutta et al. 2018).",
    setting="16 workers, digits, minibatches of 8, each update added by one 16th as the barrier's mean does; seeds 0, "
    "1, 2; a mean factor of 1, drawn once for each worker or for each step. Times are those of evaluations, one an "
    "epoch of 22 rounds, at whose end all workers wait for the slowest one's last step. K-batch-async is `soft_sync`, "
    "N-sync is `allreduce`; no recipe drops late gradients, so the other K of K-sync are computed from draws of the "
    "same times, without a simulation; these runs are one epoch of 100 rounds, with the wait at its end.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
    beside=drawn,
)
