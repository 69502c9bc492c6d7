"""Ranks of pipelines of three and four stages that are killed or stopped, each in each phase of a step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
from layout_runs import SCRIPT, counts, difference, run

from stretto.events import read_events

DIES = """
import signal
from stretto.parallel.pipeline import Pipeline
from stretto.parallel.stages import PipelineStages
from stretto.training.evaluator import Evaluator
from stretto.transport.elastic import ElasticTransport
PHASES = {
    "forward": (Pipeline, "_run_turn", 2),
    "backward": (Pipeline, "_turn_back", 2),
    "round": (ElasticTransport, "submit", 1),
    "agreement": (ElasticTransport, "_agreed", 1),
    "checkpoint": (PipelineStages, "joined", 1),
    "evaluation": (Evaluator, "_save_state", 1),
    "record": (Evaluator, "_write_epoch", 1),
}
victim, phase, sent = sys.argv[2:5]
calls = [0]
def die(call):
    if step >= 7 and config.incarnation == 0 and f"{config.worker}.{config.rank}" == victim:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), getattr(signal, sent))
def dying(inner, call):
    def run(*args, **options):
        die(call)
        return inner(*args, **options)
    return run
if phase in PHASES:
    owner, name, call = PHASES[phase]
    setattr(owner, name, dying(getattr(owner, name), call))
optimizer.register_step_post_hook(lambda *_: die(1) if phase == "step" else None)
step = 0
loader = stretto.distribute("""
DYING = SCRIPT.replace("loader = stretto.distribute(", DIES)


class Case(NamedTuple):
    """A rank that is killed or stopped; `recipe` is that of two replicas, or "" for one replica."""

    stages: int
    recipe: str
    rank: int
    phase: str
    signal: str = "SIGKILL"

    def __str__(self) -> str:
        recipe = self.recipe.partition("(")[0] or "alone"
        return f"{self.stages}-stages-{recipe}-rank-{self.rank}-{self.phase}-{self.signal}"


NO_TIMEOUT = ["--failure-timeout", "20m", "--timeout", "1200"]
"""Options with which a rank that waits for a killed one until a time-out waits longer than `run` does."""
SOME = [
    Case(3, "local_sgd(every=3)", 2, "round"),
    Case(2, "", 1, "backward", "SIGSTOP"),
]
ALONE = "forward", "backward", "step", "checkpoint"
RANKS = [(3, 0), (3, 1), (3, 2), (4, 0), (4, 2), (4, 3)]
"""Stages and rank: the first, a middle and the last one."""
ALL = [
    Case(stages, recipe, rank, phase, signal)
    for recipe, phases, signal in (
        ("", ALONE, "SIGKILL"),
        ("", ("backward", "checkpoint"), "SIGSTOP"),
        ("allreduce", (*ALONE, "round", "agreement", "evaluation", "record"), "SIGKILL"),
        ("allreduce", ("forward",), "SIGSTOP"),
        ("local_sgd(every=3)", ("backward", "round", "agreement", "checkpoint"), "SIGKILL"),
        ("local_sgd(every=3)", ("forward", "round"), "SIGSTOP"),
    )
    for phase, (stages, rank) in itertools.product(phases, RANKS)
]
TABLE = [case for case in ALL if case not in SOME]


@pytest.mark.parametrize("case", [*SOME, *(pytest.param(case, marks=pytest.mark.long) for case in TABLE)], ids=str)
def test_a_failed_rank_costs_its_replica_only_and_no_sample(tmp_path: Path, case: Case) -> None:
    """A rank that stops is declared failed after the failure timeout, also if `--timeout` is shorter."""
    replicas = 2 if case.recipe else 1
    options = ["-n", str(replicas * case.stages), "--layout", f"pipeline({case.stages})"]
    options += ["--recipe", case.recipe] if case.recipe else []
    options += ["--failure-timeout", "10s", "--timeout", "5"] if case.signal == "SIGSTOP" else NO_TIMEOUT
    options += ["--checkpoint-every", "4 rounds"] if case.phase == "checkpoint" or not case.recipe else []
    epochs = "4" if case.recipe else "2"
    folder = run(tmp_path, "run", *options, script=(epochs, f"0.{case.rank}", case.phase, case.signal), text=DYING)
    events = list(read_events(folder / "events.jsonl"))
    failed = [event for event in events if event.get("what") == "failed"]
    assert [(event["worker"], event.get("rank", 0)) for event in failed] == [(0, case.rank)]
    assert ("no heartbeat" if case.signal == "SIGSTOP" else "killed by SIGKILL") in failed[0]["why"]
    assert not any(event["event"] == "error" for event in events)
    assert {(one["once"], one["twice"], one["never"]) for one in counts(folder)} == {(60, 0, 0)}
    assert len(counts(folder)) >= int(epochs)
    if not case.recipe:
        assert difference(folder, run(tmp_path, "whole", "-n", "1")) < 1e-6
