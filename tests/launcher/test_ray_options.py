"""Options of runs on Ray, and the replacement of lost agents, without Ray."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_place import Place

from stretto.errors import LaunchError
from stretto.launcher.config import check, described, on_engine, settled
from stretto.launcher.endpoints import servers_for
from stretto.launcher.engines import resources
from stretto.launcher.engines.agents import AgentExited, AgentSpec
from stretto.launcher.engines.clusters import connected
from stretto.launcher.engines.ray import check_nodes, own_address
from stretto.launcher.process_specs import ProcessPlan
from stretto.launcher.remote_workers import RemoteWorkers, agent_specs
from stretto.membership.coordinator_records import rules_of
from stretto.membership.messages import MembersView
from stretto.run_config import RunConfig


def config(place: Place, **fields: Any) -> RunConfig:
    (place.folder / "train.py").write_text("")
    return RunConfig(Path("train.py"), **{"on": "ray", "workers": 3, **fields})


def test_all_workers_are_on_the_cluster_and_have_its_processors(place: Place) -> None:
    found = on_engine(config(place, resources="1 GPU, 4 CPU"))
    check(found)
    assert (found.workers, found.initial_workers, found.threads, found.elastic) == (0, 3, 4, True)
    assert described(settled(found)).startswith("3 workers (actors of ray, each with 1 GPU, 4 CPU) of train.py")
    assert found.record()["workers"] == 3
    assert rules_of(found, asynchronous=False).expected == 3
    assert on_engine(config(place, threads=2)).threads == 2
    assert on_engine(config(place, resources="0.5 CPU")).threads == 1
    assert on_engine(config(place, resources="1 GPU")).threads is None
    assert on_engine(config(place, on=None)) == config(place, on=None)


@pytest.mark.parametrize(
    ("fields", "cause", "to_type"),
    [
        ({"workers": 1, "max_workers": 4, "recipe": "async_sgd"}, "cannot be joined", "-n 2 --on ray --max-workers 4"),
        ({"on": "rey"}, "the engine cannot be --on rey", "--on ray"),
        ({"on": "ray://head"}, "the engine cannot be --on ray://head", "--on ray"),
        ({"workers": 0}, "the number of workers cannot be 0", "-n 4 --on ray"),
        ({"hosts": "a:2"}, "workers on a cluster cannot run with --hosts", "--on ray"),
        ({"recovery": False}, "workers on a cluster cannot run with --no-recovery", "--on ray"),
        ({"layout": "pipeline(stages=3)"}, "workers on a cluster cannot run with --layout", "--on ray"),
        ({"on": None, "resources": "1 GPU"}, "--resources needs --on", '--on ray --resources "1 GPU"'),
        ({"resources": "GPU"}, "--resources cannot be read: GPU", '--resources "1 GPU, 4 CPU"'),
    ],
)
def test_options_that_contradict_the_engine_are_refused(
    place: Place, fields: dict[str, Any], cause: str, to_type: str
) -> None:
    with pytest.raises(LaunchError, match=cause) as caught:
        check(on_engine(config(place, **fields)))
    assert str(caught.value).partition("try: ")[2].startswith(to_type)


@pytest.mark.parametrize("text", ["", "CPU", "0 CPU", "-1 CPU", "1 CPU, 2 cpu", "1", "1 CPU 2 GPU", "1 2", "nan CPU"])
def test_other_resources_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--resources cannot be read"):
        resources.parse(text)


def test_missing_ray_is_one_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match="it is not installed here") as caught, connected(config(place)):
        pass
    assert str(caught.value).endswith('  try: pip install "stretto[ray]"')


def test_address_to_listen_on_is_that_which_the_cluster_reaches() -> None:
    assert own_address(None, str) == "127.0.0.1"
    assert own_address("10.0.0.7:6379", lambda: "10.0.0.8") == "10.0.0.8"
    assert own_address("ray://127.0.0.1:10001", str) == "127.0.0.1"


def test_what_no_node_can_hold_is_refused_with_what_one_can() -> None:
    nodes = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 1.0}]
    check_nodes({"CPU": 8, "GPU": 1}, nodes)
    with pytest.raises(
        LaunchError, match="no node of the cluster can hold a worker with 9 CPU, 1 GPU, 1 disk"
    ) as caught:
        check_nodes({"CPU": 9, "GPU": 1, "disk": 1}, nodes)
    assert "got: 2 nodes, at most 8 CPU, 1 GPU, 0 disk" in str(caught.value)
    assert 'try: --resources "8 CPU, 1 GPU"' in str(caught.value)


@dataclass
class FakeAgents:
    """Agents that are started and do nothing."""

    specs: list[AgentSpec] = field(default_factory=list)
    closed: int = 0

    def start(self, spec: AgentSpec) -> FakeAgents:
        self.specs.append(spec)
        return self

    def end(self) -> None:
        """Do nothing."""

    def close(self, limit_s: float) -> None:
        self.closed += 1


@pytest.fixture
def scene(place: Place) -> Any:
    """Return the remote workers of a run on Ray, and their agents."""
    agents = FakeAgents()
    with servers_for(0, plain=False, coordinated=True) as servers:
        plan = ProcessPlan(on_engine(config(place, restarts=2)), place.folder, None, servers)
        remote = RemoteWorkers(plan, agents.start, pytest.fail)
        assert [spec.numbers for spec in agent_specs(plan)] == [range(0, 1), range(1, 2), range(2, 3)]
        assert not plan.numbers_shown, "the launcher shows the output of their log files"
        remote.start()
        yield remote, agents


LOST = AgentExited("actor 1", -9, "its actor was lost: ActorDiedError: x\nmore", is_replaceable=True)


@pytest.mark.parametrize("generation", [0, 3])
def test_lost_agent_is_reported_and_replaced_within_the_restarts(scene: Any, generation: int) -> None:
    remote, agents = scene
    view = MembersView(generation, frozenset({0, 2}) if generation else frozenset())
    reports: list[tuple[int, str, bool]] = []
    for restart in (1, 2):
        remote.handle(LOST, view, lambda *report: reports.append(report))
        assert reports[-1] == (1, "its actor was lost: ActorDiedError: x", True)
        assert len(agents.specs) == 3 + restart
        key = msgspec.json.decode(agents.specs[-1].key)
        assert (key["first"], key["replaces"], agents.specs[-1].numbers) == (1, True, range(1, 2))
        assert remote.count() == 3
    assert not msgspec.json.decode(agents.specs[1].key)["replaces"]


def test_agent_that_was_replaced_too_often_is_lost(scene: Any) -> None:
    remote, agents = scene
    remote._note = lambda text: notes.append(text)
    notes: list[str] = []
    reports: list[bool] = []
    for _ in range(3):
        remote.handle(
            LOST, MembersView(1, frozenset({0, 2}), frozenset({1})), lambda *report: reports.append(report[2])
        )
    assert reports == [True, True, False]
    assert (len(agents.specs), remote.count(), len(notes)) == (5, 2, 1)


def test_loss_of_a_worker_that_took_part_is_not_counted(scene: Any) -> None:
    remote, _ = scene
    drained = AgentExited("actor 1", 3, "actor 1: all workers left", is_replaceable=True)
    reports: list[bool] = []
    for _ in range(4):
        remote.handle(LOST, MembersView(1, frozenset({0, 1, 2})), lambda *report: reports.append(report[2]))
        view = MembersView(1, frozenset({0, 2}), left=frozenset({1}))
        remote.handle(drained, view, lambda *report: reports.append(report[2]))
    assert reports == [True] * 8


def test_run_ends_without_actors_that_wait_and_not_before_those_that_have_joined(scene: Any) -> None:
    remote, _ = scene
    remote.handle(AgentExited("actor 0", 0), MembersView(1, frozenset({1, 2}), left=frozenset({0})), pytest.fail)
    finishing = MembersView(1, frozenset({2}), frozenset({1}), frozenset({0}), 1)
    assert remote.is_ending(finishing)
    assert not remote.is_over(finishing, is_ending=True)
    remote.handle(AgentExited("actor 2", 0), finishing, pytest.fail)
    assert remote.is_over(finishing, is_ending=True)  # actor 1 waits
    assert not remote.is_over(finishing, is_ending=False)
    assert remote.is_over(MembersView(1, stopped="too few"), is_ending=False)


def test_run_that_cannot_continue_ends_after_the_agents_of_failed_workers(scene: Any) -> None:
    remote, _ = scene
    stopped = MembersView(0, failed=frozenset({0, 1}), stopped="too few")  # actor 2 waits
    assert not remote.is_over(stopped, is_ending=False)
    for number in (0, 1):
        with pytest.raises(LaunchError, match="ValueError"):
            remote.handle(AgentExited(f"actor {number}", 1, "ValueError: boom"), stopped, pytest.fail)
    assert remote.is_over(stopped, is_ending=False)


def test_workers_that_join_later_take_no_room_from_those_that_the_run_begins_with(place: Place) -> None:
    agents = FakeAgents()
    with servers_for(0, plain=False, coordinated=True) as servers:
        plan = ProcessPlan(on_engine(config(place, max_workers=5)), place.folder, None, servers)
        remote = RemoteWorkers(plan, agents.start, pytest.fail)
    remote.start()
    remote.grow(MembersView(0, frozenset({0, 1})))
    assert [spec.numbers.start for spec in agents.specs] == [0, 1, 2]
    for _ in range(2):
        remote.grow(MembersView(1, frozenset({0, 1, 2})))
        assert [spec.numbers.start for spec in agents.specs] == [0, 1, 2, 3, 4]


def test_cluster_starts_more_workers_than_the_run_begins_with(place: Place) -> None:
    found = on_engine(config(place, max_workers=5))
    rules = rules_of(found, asynchronous=False)
    assert (rules.expected, rules.reserved, rules.return_limit_s) == (3, 5, found.timeout_s)
    with servers_for(0, plain=False, coordinated=True) as servers:
        specs = agent_specs(ProcessPlan(found, place.folder, None, servers))
    assert [spec.numbers.start for spec in specs] == [0, 1, 2, 3, 4]


def test_lost_agent_is_not_replaced_once_the_run_ends(scene: Any) -> None:
    remote, agents = scene
    remote._note = str
    view = MembersView(1, frozenset({1, 2}), left=frozenset({0}), finished=1)
    remote.handle(AgentExited("actor 0", 0), view, pytest.fail)
    reports: list[bool] = []
    remote.handle(LOST, view, lambda *report: reports.append(report[2]))
    assert (reports, len(agents.specs)) == ([False], 3)


def test_error_of_a_script_ends_the_run(scene: Any) -> None:
    remote, _ = scene
    with pytest.raises(LaunchError, match="actor 2: it failed"):
        remote.handle(AgentExited("actor 2", 1, "actor 2: it failed"), MembersView(1), pytest.fail)
