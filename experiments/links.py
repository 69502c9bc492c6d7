"""Experiment on speed-up by the ratio of communication to computation, from 10 Mbit/s to 100 Gbit/s."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, legend, line, number, panel, rows, ticks
from experiments.runs import Found, Point, distinct, mean, where

WORKERS = 8
STEP_S = 0.005
NETWORKS = {"10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
LATENCY = "0.05ms"
HIDDEN = 512
NBYTES = 4 * (64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10)
"""Bytes of the perceptron's parameters."""

TARGET = "test_loss<=0.3"
SHAPE = f"--batch 8 --hidden {HIDDEN} --samples 2874 --epochs 6"
RECIPES = {
    "allreduce": ("allreduce", 0.1),
    "local_sgd(16)": ("local_sgd(every=16)", 0.1),
    "async_sgd": ("async_sgd", 0.0125),
    "top_k(0.01)": ("allreduce(how=error_feedback(top_k(0.01)))", 0.1),
}
"""Recipes with learning rates: for a mean of 8, 8 times the rate of one machine; `async_sgd` adds full updates."""

SPARING = ("local_sgd(16)", "top_k(0.01)")
"""Recipes expected to pay off on the slowest network."""

ONE = "one worker"


def grid(quick: bool) -> list[Point]:
    """Return one worker, and 8 workers with each recipe on each network."""
    found = []
    for seed in SEEDS[: 1 if quick else None]:
        alone = f"{SHAPE} --lr 0.0125"
        found.append(Point({"recipe": ONE}, 1, "allreduce", alone, seed, target=TARGET))
        for name, (recipe, lr) in RECIPES.items():
            for rate in list(NETWORKS)[:: 4 if quick else 1]:
                args, values = f"{SHAPE} --lr {lr}", {"recipe": name, "network": rate}
                network = f"{rate.replace(' ', '')} {LATENCY}"
                found.append(Point(values, WORKERS, recipe, args, seed, network, target=TARGET))
    return found


def ratio(network: str) -> float:
    """Return the time to send the parameters once over a worker's link, divided by that of a step."""
    return 8 * NBYTES / NETWORKS[network] / STEP_S


def speed_up(found: Found, name: str, network: str, what: str) -> float | None:
    """Return the speed-up over one worker: of samples per second, or of the time to the target."""
    ours = mean(where(found["points"], {"recipe": name, "network": network}), what)
    alone = mean(where(found["points"], {"recipe": ONE}), what)
    if not ours or not alone:
        return None
    return ours / alone if what == "samples_per_second" else alone / ours


def names(found: Found) -> list[str]:
    """Return the recipes."""
    return [one for one in distinct(found["points"], "recipe") if one != ONE]


def table(found: Found) -> Iterator[str]:
    """Yield both speed-ups by network."""
    body = []
    for network in distinct(found["points"], "network"):
        row = [network, f"{ratio(network):.2g}"]
        for name in names(found):
            both = [speed_up(found, name, network, what) for what in ("samples_per_second", "seconds_to_target")]
            row.append(" / ".join(number(one, 2) for one in both))
        body.append(row)
    yield from rows(["network", "communication to computation", *names(found)], body)


def paint(figure: Figure, found: Found) -> None:
    """Plot speed-ups by ratio."""
    networks = distinct(found["points"], "network")
    ratios = [ratio(one) for one in networks]
    panels = {"samples_per_second": "speed-up of samples/s", "seconds_to_target": "speed-up to a loss of 0.3"}
    for place, (what, title) in enumerate(panels.items()):
        ax = panel(figure, place, 2, title, "communication to computation")
        for colour, name in enumerate(names(found)):
            line(ax, ratios, [speed_up(found, name, one, what) for one in networks], name, colour)
        ax.axhline(1, color="#8a8a8a", ls=(0, (2, 2)), lw=1)
        ticks(ax, ratios, [f"{one:.2g}" for one in ratios])
        ax.set_yscale("log")
        ax.set_yticks([0.1, 1, 8], ["0.1", "1", "8"])
        ax.minorticks_off()
        if place == 0:
            legend(ax)


def verdict(found: Found) -> str:
    """Return the ratio up to which each recipe pays off."""
    said, held = [], []
    for name in names(found):
        faster = {
            network: (speed_up(found, name, network, "seconds_to_target") or 0.0) > 1
            for network in distinct(found["points"], "network")
        }
        slowest = min((one for one in faster if faster[one]), key=lambda one: NETWORKS[one], default=None)
        held.append(faster[min(faster, key=lambda one: NETWORKS[one])] == (name in SPARING))
        pays = f"pays down to {slowest} (ratio {ratio(slowest):.2g})" if slowest else "never pays"
        said.append(f"{name} {pays}")
    first = "The claim holds" if all(held) else "The claim does not hold throughout"
    return f"{first}. By the time to a test loss of 0.3, of the networks tried: {'; '.join(said)}."


EXPERIMENT = Experiment(
    name="links",
    title="Speed-up against communication to computation",
    claim="It pays when computing is long against sending: small nets on slow links lose, fewer exchanges and fewer "
    "bytes win them back (parameter averaging, gradient compression).",
    setting=f"8 workers and one, digits, a perceptron of {NBYTES / 1e3:.0f} kB, minibatches of 8, steps of 5 ms, a "
    f"latency of {LATENCY}; seeds 0, 1, 2. The ratio is the time to send the parameters once over one link by that of "
    "a step. A cell has the speed-up over one worker of samples per second / of the time to a test loss of 0.3, a dash "
    "where a seed did not reach it. `async_sgd` sends over one link of a server that all share.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
)
