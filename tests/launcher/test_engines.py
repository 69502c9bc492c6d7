"""Engines: the conformance test, and a run whose engine reports exits late, twice and never."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import pytest

from stretto.launcher.engines.conformance import check_engine
from stretto.launcher.engines.interface import Exited
from stretto.launcher.engines.local import LocalEngine, LocalProcess
from stretto.launcher.local import run
from stretto.launcher.process_specs import ProcessSpec
from stretto.launcher.progress_display import ProgressDisplay
from stretto.membership.worker_status import KeptModel
from stretto.process_config import WorkerConfig
from stretto.report.run_record import record
from stretto.run_config import RunConfig

EPOCHS, SAMPLES = 4, 96
TRAIN = f"""
import os, signal, time, torch, stretto
from stretto.process_config import worker_config

config = worker_config()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn({SAMPLES}, 4), torch.randn({SAMPLES}, 1))
loader = stretto.distribute(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
steps = 0
for epoch in range({EPOCHS}):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        steps += 1
        time.sleep(0.02)
        if config.incarnation == 0 and steps == {{1: 5, 2: 13}}.get(config.worker):
            os.kill(os.getpid(), signal.SIGKILL)
"""
WRITES_AND_STOPS = """
import os, signal
from stretto.membership.worker_status import KeptModel, status
from stretto.process_config import worker_config

status.open(worker_config().status_fd)
status.keep(KeptModel.WRITING)
os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


class UnreliableEngine(LocalEngine):
    """Reports a killed worker 1 late and twice, and a killed worker 2 never."""

    unreported: ClassVar[list[LocalProcess]] = []

    def _await(self, number: int, process: LocalProcess) -> None:
        code = process.wait()
        end = Exited(number, code, False, process.record(), process)
        if code == -signal.SIGKILL and number == 2:
            self.unreported.append(process)
            return
        self._inbox.put(end)
        if code == -signal.SIGKILL and number == 1:
            for after_s in (0.2, 1.0):
                threading.Timer(after_s, self._inbox.put, [end]).start()


def test_local_engine_conforms() -> None:
    check_engine(LocalEngine)


def test_conformance_finds_an_engine_that_loses_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[LocalProcess] = []

    class Silent(LocalEngine):
        def _await(self, number: int, process: LocalProcess) -> None:
            process.wait()
            lost.append(process)

    monkeypatch.setattr("stretto.launcher.engines.conformance.LIMIT_S", 2.0)
    with pytest.raises(AssertionError, match="an exit was not reported"):
        check_engine(Silent)
    for process in lost:
        process.release()


def test_end_of_a_run_does_not_wait_for_the_model_of_a_stopped_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 60.0
    monkeypatch.setattr("stretto.launcher.engines.local.WRITING_S", limit_s)
    engine = LocalEngine(SimpleQueue())
    command = [sys.executable, "-c", WRITES_AND_STOPS]
    process = engine.start(ProcessSpec(0, 1, command, dict(os.environ), WorkerConfig()))
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process.record().model == KeptModel.WRITING
    began = time.monotonic()
    engine.close()
    process.output.close()
    assert process.is_released and time.monotonic() - began < limit_s


def test_exits_reported_late_twice_or_never_neither_stop_the_run_nor_count_a_sample_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    folder = run(
        RunConfig(Path("train.py"), workers=3, recipe="allreduce", failure_timeout_s=4.0, output="none"),
        ProgressDisplay(quiet=True),
        UnreliableEngine,
    )
    found = record(folder)
    assert found["failed"] is None
    assert len(UnreliableEngine.unreported) == 1
    UnreliableEngine.unreported.pop().release()
    assert [failure["process"] for failure in found["failures"]] == ["worker 1", "worker 2"], found["failures"]
    assert [epoch["once"] for epoch in found["sample_counts"]] == [SAMPLES] * EPOCHS, found["sample_counts"]
