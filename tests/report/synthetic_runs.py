"""Run folders as the launcher and the workers would write them, with figures that a test can know beforehand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.events import COORDINATOR, PHASES, Event, of_process
from stretto.report.run_record import record

Events = list[dict[str, Any]]
MACHINE = {"system": "Linux 6.1", "processor": "Imaginary CPU", "cores": 4, "memory_gib": 16.0}


def named(event: Event) -> Event:
    """Return an event with the name of its process; `worker` may be the number of any process."""
    if "process" in event or not isinstance(number := event.get("worker"), int):
        return event
    return {name: value for name, value in event.items() if name != "worker"} | of_process(number)


def split(t: float, exchanging: float, evaluating: float) -> dict[str, float]:
    """Seconds that sum to t."""
    rest = t - exchanging - evaluating
    parts = dict.fromkeys(PHASES, 0.0)
    known = {"computing": 0.9 * rest, "loading": 0.06 * rest, "other": 0.04 * rest}
    return parts | known | {"exchanging": exchanging, "evaluating": evaluating}


def training(
    workers: int, step_s: float, bytes_a_round: int, every: int, best: float, batch: int = 8, epoch_steps: int = 50
) -> Events:
    """Three epochs of 50 steps with a batch of 8; an evaluation of 0.1 s after each."""
    steps = 3 * epoch_steps
    events: Events = [{"event": "start", "t": 0.0, "worker": w, "threads": 1} for w in range(workers)]
    for step in range(1, steps + 1):
        epoch, evaluations = (step - 1) // epoch_steps, (step - 1) // epoch_steps
        trained = step * step_s
        t = trained + 0.1 * evaluations
        rounds = step // every if every else 0
        counts = {"samples": step * batch, "rounds": rounds, "bytes_sent": rounds * bytes_a_round}
        counts |= {"bytes_received": counts["bytes_sent"], "time_breakdown": split(t, 0.2 * trained, 0.1 * evaluations)}
        for worker in range(workers):
            loss = 2.3 * math.exp(-step / 40) + 0.1 + 0.02 * math.sin(7 * step + worker)
            here = {"t": t, "worker": worker, "step": step}
            events.append({"event": "log", **here, "samples": step * batch * workers, "values": {"loss": loss}})
            if step % 10 == 0:
                events.append({"event": "progress", **here, **counts})
        if step % epoch_steps == 0:
            lead = {"t": t + 0.1, "worker": 0, "epoch": epoch, "step": step, "samples": step * batch * workers}
            lead["training_s"] = trained
            metrics = {"test_accuracy": best - 0.3 * math.exp(-step / 40), "test_loss": 0.2 + 30 / step / 10}
            events.append({"event": "evaluation", **lead, "metrics": metrics})
            seen = {"once": epoch_steps * batch * workers, "twice": 0, "never": 0, "dropped": 0}
            events.append({"event": "epoch", **lead, "sample_counts": seen, "drift": 0.0, "workers": []})
    t = steps * step_s + 0.3
    end = counts | {"time_breakdown": split(t, 0.2 * steps * step_s, 0.3), "step": steps, "training_s": steps * step_s}
    return events + [{"event": "end", "t": t, "worker": w, "evaluate": True, **end} for w in range(workers)]


def exchanging(
    events: Events,
    purposes: Mapping[str, Sequence[int]],
    entries: Sequence[int] | None = None,
    norms: Callable[[float, int], Sequence[float]] | None = None,
) -> Events:
    """Add traffic to events: bytes and values per round, norms as a function of time and worker."""
    for event in events:
        if event["event"] in ("progress", "end"):
            rounds = event["rounds"]
            event["traffic"] = {name: [rounds * value for value in row] for name, row in purposes.items()}
            if entries is not None:
                event["values_sent"] = [rounds * value for value in entries]
            if norms is not None:
                event["residual_norms"] = list(norms(event["t"], event["worker"]))
    return events


def asynchronous(
    staleness: Sequence[Sequence[int]], step_s: Sequence[float] = (), held: Sequence[float] | None = None
) -> Events:
    """One pass without a barrier: `staleness` of each worker's updates, one a step of 8 samples, logged every 4."""
    paces = [*step_s, *[0.02] * (len(staleness) - len(step_s))]
    events: Events = [{"event": "start", "t": 0.0, "worker": w, "servers": 1} for w in range(len(staleness))]
    for worker, values in enumerate(staleness):
        lost = {} if held is None else {"blocked_s": held[worker]}
        events += _batches(worker, values, paces[worker], rate=sum(8 / pace for pace in paces))
        t = len(values) * paces[worker]
        counts = {"step": len(values), "rounds": len(values), "samples": 8 * len(values), **lost}
        counts |= {"bytes_sent": 1000 * len(values), "bytes_received": 0, "time_breakdown": split(t, 0.1 * t, 0.0)}
        events.append({"event": "end", "t": t, "worker": worker, "training_s": t, **counts})
    whole, t = 8 * sum(map(len, staleness)), max(event["t"] for event in events)
    lead = {"t": t, "worker": 0, "epoch": 1, "step": len(staleness[0]), "samples": whole, "training_s": t}
    events.append({"event": "evaluation", **lead, "versions": [7], "metrics": {"test_accuracy": 0.96}})
    seen = {"once": whole, "twice": 0, "never": 0, "dropped": 0}
    return sorted(
        [*events, {"event": "epoch", **lead, "sample_counts": seen, "workers": []}], key=lambda event: event["t"]
    )


def _batches(worker: int, values: Sequence[int], pace: float, rate: float) -> Events:
    """Return the events of one worker's updates: four per event, with a loss that falls over time."""
    events: Events = []
    for start in range(0, len(values), 4):
        some = values[start : start + 4]
        t, done = (start + len(some)) * pace, start + len(some)
        updates = [[start + i + 1, start + i + 1, value, 8] for i, value in enumerate(some)]
        events.append({"event": "update_applied", "t": t, "worker": worker, "updates": updates})
        here = {"t": t, "worker": worker, "step": done, "samples": round(rate * t)}
        events.append({"event": "log", **here, "values": {"loss": 10.0 - t}})
    return events


def write_run(
    folder: Path,
    *,
    recipe: str | None = None,
    workers: int = 1,
    global_batch_of: int = 1,
    seed: int = 0,
    step_s: float = 0.02,
    bytes_a_round: int = 1000,
    every: int = 1,
    best: float = 0.97,
    epoch_steps: int = 50,
    events: Events | None = None,
) -> Path:
    """A run folder; `events` replaces the training's own. A run without a recipe is one alone."""
    folder.mkdir(parents=True)
    run = {"stretto": "0.1.0", "script": "train.py", "args": ["--hidden", "32"], "recipe": recipe, "workers": workers}
    run |= {
        "seed": seed,
        "single_process": recipe is None,
        "global_batch_of": global_batch_of,
        "threads": 1,
        "machine": MACHINE,
    }
    run |= {"started": "2026-11-21T10:45:00+00:00", "command": ["stretto", "run", "train.py"]}
    run |= {"versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}}
    (folder / "run.json").write_text(json.dumps(run))
    batch, rounds = 8 * global_batch_of, every if recipe else 0
    made = training(workers, step_s, bytes_a_round, rounds, best, batch, epoch_steps) if events is None else events
    (folder / "events.jsonl").write_text("".join(json.dumps(named(event)) + "\n" for event in made))
    return folder


def write_comparison(
    folder: Path,
    recipes: tuple[str, ...] = ("allreduce()", "local_sgd(every=16)"),
    seeds: int = 1,
    *,
    counts_steps: bool = False,
) -> Path:
    """A comparison of alone, the joined batch of two and some recipes on two workers.

    All train on as many samples; if the script counts its steps, alone on half of them.
    """
    records: list[dict[str, Any]] = []
    for seed in range(seeds):
        write_run(folder / f"alone-{seed}", seed=seed, step_s=0.03, epoch_steps=50 if counts_steps else 100)
        write_run(folder / f"joined-{seed}", global_batch_of=2, seed=seed, step_s=0.05)
        records += [record(folder / f"{kind}-{seed}") for kind in ("alone", "joined")]
        for place, recipe in enumerate(recipes):
            asked = {"recipe": recipe, "workers": 2, "seed": seed, "every": 16**place, "best": 0.97 - 0.004 * place}
            run = write_run(folder / f"recipe{place}-{seed}", **asked)
            far = [{"samples": 800 * i, "parameter_distance": 0.1 / i} for i in (1, 2, 3)]
            known = {"compared_with": f"joined-{seed}", "parameter_distance": 0.03, "distances": far}
            records.append(record(run) | known)
    for one in records:
        one["folder"] = Path(one["folder"]).name
    question = {"script": "train.py", "args": [], "workers": [2], "seeds": seeds, "target": None}
    question["command"] = ["stretto", "compare", "-n", "2", "train.py"]
    (folder / "compare.json").write_text(json.dumps({"question": question, "runs": records}))
    return folder


def with_deaths(events: Events) -> Events:
    """Add failures to a run of three workers: worker 1 is killed and restarted, worker 2 fails permanently.

    Who tells of it began 1.5 s before the training did.
    """
    began, zero = 1.5, 1000.0
    for event in events:
        if event["event"] == "start":
            event["at"] = zero + event["t"]

    def told(event: str, worker: int, t: float, /, **carries: Any) -> dict[str, Any]:
        return {"event": event, "t": t + began, "at": zero + t, "worker": worker, **carries}

    def member(what: str, worker: int, life: int, t: float, generation: int, **carries: Any) -> dict[str, Any]:
        return told("membership", worker, t, what=what, incarnation=life, generation=generation, **carries)

    kill = {"verb": "kill", "kind": "worker", "numbers": [1], "text": "killed: worker 1"}
    pause = {"verb": "pause", "kind": "worker", "numbers": [2], "text": "stopped: worker 2"}
    happened = [
        member("formed", COORDINATOR, 0, -0.5, 1, members=[0, 1, 2], why="all are there"),
        told("fault_injected", 1, 0.5, **kill),
        member("failed", 1, 0, 0.51, 1, why="killed by SIGKILL"),
        member("formed", COORDINATOR, 0, 0.75, 2, members=[0, 2], why="worker 1 failed"),
        {"event": "samples_reassigned", "t": 0.8, "worker": 0, "failed_worker": 1, "incarnation": 0, "samples": 24},
        member("joined", 1, 1, 1.51, 3, why="started again"),
        member("formed", COORDINATOR, 0, 1.51, 3, members=[0, 1, 2], why="worker 1 joined"),
        told("fault_injected", 2, 2.0, **pause),
        member("slow", 2, 0, 2.3, 3, why="no heartbeat for 0.3 s"),
        member("failed", 2, 0, 2.5, 3, why="no heartbeat for 0.5 s"),
        member("formed", COORDINATOR, 0, 2.6, 4, members=[0, 1], why="worker 2 failed"),
        member("left", 0, 0, 3.3, 4, why=LEFT),
    ]
    kept = [event for event in events if not (event["event"] == "end" and event["worker"] == 2)]
    return sorted([*kept, *happened], key=lambda event: event["t"])


LEFT = "it has left the loop"
