"""A simulated script behaves as in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shutil import rmtree
from textwrap import dedent
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from simulator.harness import simulated

from stretto.simulator.isolation.shared_memory import SharedArrays

TRAINS = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(400, 6)
net = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
loader = stretto.distribute(net, optimizer, loader)
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
"""


def trains(epochs: int = 1) -> str:
    return TRAINS.replace("EPOCHS", str(epochs))


LOOP = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(96, 4)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
# ---
for rows, in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 4)):
    optimizer.zero_grad()
    (net(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""


def test_script_keeps_its_own_future_annotations_setting() -> None:
    """Dataclasses whose fields' types become options are common."""
    text = """
    import dataclasses
    @dataclasses.dataclass
    class Options:
        lr: float = 0.1
    assert [field.type for field in dataclasses.fields(Options)] == [float]
    """
    simulated(1, dedent(text) + trains())


def test_reader_of_an_open_file_is_not_cached(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("0\n1\n2\n3\n")
    text = f"""
    import numpy
    with open({str(data)!r}) as file:
        parts = [numpy.loadtxt(file, max_rows=2).tolist() for _ in range(2)]
    assert parts == [[0, 1], [2, 3]], parts
    whole = [numpy.loadtxt({str(data)!r}).tolist() for _ in range(2)]
    assert whole == [[0, 1, 2, 3]] * 2
    """
    simulated(2, dedent(text) + trains())


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    text = f"""
    import numpy
    file = {str(tmp_path)!r} + "/%d.txt" % torch.initial_seed()
    for number in range(3):
        numpy.savetxt(file, [number] * (1 + number))
        assert numpy.loadtxt(file).tolist() == ([number] * (1 + number) if number else 0)
    """
    simulated(2, trains() + dedent(text))


def test_each_worker_has_its_own_working_directory_and_modes() -> None:
    """Settings of one worker do not affect the next, like those of separate processes."""
    text = """
    import os, torch
    assert os.path.isabs(__file__)
    assert torch.get_default_dtype() is torch.float32
    torch.set_default_dtype(torch.float64)
    os.makedirs(__file__ + ".d/inner", exist_ok=True)
    assert not os.getcwd().endswith("inner")
    os.chdir(__file__ + ".d/inner")
    """
    before = os.getcwd()
    simulated(2, dedent(text) + trains() + "\nassert os.getcwd().endswith('.d/inner')\n", net="100Mbit/s 1ms")
    assert os.getcwd() == before
    assert torch.get_default_dtype() is torch.float32


def test_modules_beside_the_script_are_imported_again_in_each_simulation(tmp_path: Path) -> None:
    """Packages installed below that directory are kept, since they may not be loaded twice."""
    installed = tmp_path / ".venv" / "lib"
    for place, name in (tmp_path, "beside_it.py"), (tmp_path / "beside_too", "__init__.py"), (installed, "below_it.py"):
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("loaded = []\n")
    text = f"""
    import sys
    import beside_it, beside_too
    sys.path.append({str(installed)!r})
    import below_it
    for one in beside_it, beside_too:
        one.loaded.append(0)
        assert len(one.loaded) == 1
    sys.path.remove({str(installed)!r})
    """
    try:
        for _ in range(2):
            simulated(1, dedent(text) + trains(), folder=tmp_path)
            rmtree(tmp_path / "run")
            assert {"beside_it", "beside_too", "below_it"} & set(sys.modules) == {"below_it"}
    finally:
        sys.modules.pop("below_it", None)


@pytest.mark.parametrize("name", ["kept", "parts.kept", "bare.kept"])
def test_modules_beside_the_script_are_each_workers_own(tmp_path: Path, name: str) -> None:
    """A model that a module makes is trained by one worker, and its replicas are those of a script in one file."""
    file = tmp_path / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    if name.startswith("parts"):
        (file.parent / "__init__.py").touch()
    head, loop = dedent(LOOP).split("# ---\n")
    file.write_text(head)
    faults: dict[str, Any] = {"fault": "kill worker 1 at 0.05s, back after 20ms", "folder": tmp_path}
    try:
        found = simulated(3, f"from {name} import *\n" + loop, "local_sgd(every=2)", **faults)
        rmtree(tmp_path / "run")
        assert found.final == simulated(3, head + loop, "local_sgd(every=2)", **faults).final
    finally:
        for one in {name, name.partition(".")[0]} & set(sys.modules):
            del sys.modules[one]


def test_deleted_working_directory_is_tolerated(tmp_path: Path) -> None:
    text = """
    import os, tempfile
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    """
    simulated(2, dedent(text) + trains(), folder=tmp_path)


def test_output_of_a_worker_is_a_regular_text_stream() -> None:
    text = """
    import sys
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(line_buffering=True)
        stream.buffer.write(b"bytes\\n")
        stream.fileno()
        print("text \\udc80", file=stream, flush=True)
        assert not stream.isatty() and stream.writable() and stream.encoding == "utf-8"
    """
    ended = simulated(2, dedent(text) + trains())
    assert len(ended.of("end")) == 2


@pytest.mark.parametrize("speed", ["1,10", "10,1"])
def test_time_limit_ends_all_workers_after_the_same_step(speed: str) -> None:
    """The fast worker has started its 50th step at the limit, and waits for the slow one."""
    ended = simulated(2, trains(), "local_sgd(every=50)", speed=speed, time_s=1.0)
    assert [one["step"] for one in ended.of("end")] == [50, 50]


@pytest.mark.parametrize(
    "fault", ["pause worker 1 for 5s at 12ms; kill worker 1 at 12ms, back after 1s", "pause worker 1 for 1s at 12ms"]
)
def test_worker_paused_and_killed_at_the_same_time_is_killed(fault: str) -> None:
    ended = simulated(2, trains(), "allreduce", fault=fault)
    assert ended.of("epoch")[-1]["sample_counts"]["once"] == 400


def test_slow_link_of_a_missing_server_is_refused() -> None:
    """The script names the recipe, so that it is known only when it runs."""
    text = trains().replace("loader)\nfor", 'loader, recipe="async_sgd")\nfor')
    with pytest.raises(Exception, match="the link of server 1 was slowed at 0 s .* has no such server"):
        simulated(2, text, net="100Mbit/s", fault="slow link of server 1 by 10 for 1s at 0s")


def test_slowdowns_of_a_shared_link_multiply() -> None:
    """The end of the server's slowdown does not end the worker's."""
    faults = ["slow link of worker 0 by 10 for 1h at 0s", "slow link of server 0 by 2 for FORs at 0s"]
    given = [faults[:1], *([faults[0], faults[1].replace("FOR", wait)] for wait in ("0.01", "1000"))]
    net = "1Mbit/s, servers with workers"
    one, shortly, both = (
        simulated(2, trains(), "async_sgd", net=net, fault="; ".join(these)).seconds for these in given
    )
    assert one < both
    assert shortly == pytest.approx(one, rel=0.05)


def test_writes_to_shared_data_are_private() -> None:
    """Data of the script and of the data set; two epochs, so that it is written before it is read."""
    writes = """
    class Noting(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.seen = torch.randn(8000, 6), torch.zeros(8000)
        def __len__(self):
            return len(self.x)
        def __getitem__(self, at):
            self.seen[at] += 1
            TABLE[at] += 1
            return self.x[at], self.x[at].sum(0, keepdim=True)
    TABLE = torch.zeros(8000)
    data = Noting()
    loader = torch.utils.data.DataLoader(data, batch_size=1000)
    loader = stretto"""
    text = trains(2).replace("loader = stretto", dedent(writes))
    ended = simulated(4, text + "\nassert data.seen.sum() == TABLE.sum() == 4000, (data.seen.sum(), TABLE.sum())")
    assert ended.of("epoch")[-1]["sample_counts"]["once"] == 8000


def test_equal_data_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name and a data set with the same bytes, of a dtype that numpy lacks."""
    made: list[SharedArrays] = []
    monkeypatch.setattr("stretto.simulator.runner.SharedArrays", lambda: made.append(SharedArrays()) or made[-1])
    text = trains().replace("x = torch.randn(400, 6)", "x = torch.randn(8000, 6).bfloat16()")
    text = text.replace("net(a) - b", "net(a.float()) - b.float()")
    simulated(3, text + "\nassert x.data_ptr() == loader.dataset.tensors[0].data_ptr()")
    assert made[0].saved == 2 * 8000 * 6 * 2, "what is not the first worker's, and large"


@pytest.mark.parametrize("fault", ["", "kill worker 1 at 1h"])
@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_data_is_shared_before_the_next_worker_loads_its_own(
    recipe: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that can fail wait for each other before they train, after all have loaded their data."""
    loaded: list[int] = []
    shared: list[int] = []
    monkeypatch.setattr(torch, "loaded", loaded, raising=False)
    monkeypatch.setattr(SharedArrays, "loader", lambda *_: shared.append(len(loaded)))
    simulated(3, trains().replace("net =", "torch.loaded.append(1)\nnet ="), recipe, fault=fault)
    assert shared == [1, 2, 3]


def test_profiler_sees_the_ranges_of_optimizers() -> None:
    """Ranges are skipped only without a profiler; those of the script are kept."""
    text = trains().replace("for epoch", "profile = torch.profiler.profile()\nprofile.start()\nfor epoch")
    text += """
profile.stop()
seen = {event.key for event in profile.key_averages()}
assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= seen, seen
assert torch.autograd.profiler.record_function("mine")(lambda: 3)() == 3
with torch.autograd.profiler.record_function("mine") as mark:
    assert isinstance(mark, torch.profiler.record_function)
"""
    before = torch.autograd.profiler.record_function
    simulated(1, text)
    assert torch.autograd.profiler.record_function is before


def test_each_worker_has_its_own_singletons_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its accumulation counter is a singleton: workers that share one step after each other's batches."""

    class GradientState:
        _shared_state: ClassVar[dict[str, Any]] = {}

        def __init__(self) -> None:
            self.__dict__ = self._shared_state

    state: Any = ModuleType("accelerate.state")
    state.GradientState = GradientState
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    text = """
    import sys
    kept = sys.modules["accelerate.state"].GradientState()
    assert not vars(kept)
    kept.count = 0
    """
    counts = """
    for a, b in loader:
        optimizer.zero_grad()
        kept.count += 1
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
    assert kept.count == 50, kept.count
    """
    simulated(2, dedent(text) + trains(0) + dedent(counts), net="100Mbit/s 1ms")
    assert not GradientState._shared_state
