"""The process of a worker, as the script's: it forks, asks for the terminal's size, and meets the system's limits."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from own_disk import own_disk
from run_place import Place

from stretto.launcher.worker_main import failure

FORKS = """
import atexit, os, pathlib, stub, sys
stub.api.close = lambda: pathlib.Path(f"closed-{config.worker}-{os.getpid() == parent}").touch()
parent, codes = os.getpid(), []
atexit.register(lambda: pathlib.Path(f"exit-{config.worker}-{os.getpid() == parent}").touch())
for end in (lambda: None, lambda: sys.exit(0), lambda: sys.exit(3), lambda: sys.exit("no"), lambda: 1 / 0):
    if (pid := os.fork()) == 0:
        print("a line of the child")
        end()
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    pathlib.Path(f"codes-{config.worker}").write_text(str(codes))
"""

SIZES = """
import os, shutil
print("sizes", tuple(os.get_terminal_size()), tuple(os.get_terminal_size(0)), tuple(shutil.get_terminal_size((50, 7))))
"""


def test_forked_children_end_as_under_python_and_the_run_is_their_parents(place: Place) -> None:
    place.script(FORKS)
    result = place.stretto("run", "-n", "2", "--no-recovery", "--out", "run", "train.py")
    _, err = result.communicate(timeout=90)
    assert result.returncode == 0, err.decode()
    for worker in range(2):
        assert Path(f"codes-{worker}").read_text() == "[0, 0, 3, 1, 1]"
        assert Path(f"exit-{worker}-True").exists() and Path(f"exit-{worker}-False").exists()
        assert Path(f"closed-{worker}-True").exists() and not Path(f"closed-{worker}-False").exists()
    log = Path("run/worker-0.log").read_text()
    assert log.count("a line of the child") == 5 and "ZeroDivisionError" in log


CHILD = """
import multiprocessing, sys, torch, stretto

def train():
    model = torch.nn.Linear(1, 1)
    stretto.distribute(model, torch.optim.SGD(model.parameters()), [])

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_process_that_a_script_starts_is_refused_as_a_worker_immediately(place: Place, way: str) -> None:
    Path("own.py").write_text(CHILD)
    result = place.stretto("run", "-n", "1", "--out", "run", "own.py", way)
    assert result.wait(50) == 1  # a wait for the coordinator lasts a minute
    log = Path("run/worker-0.log").read_text()
    assert "cannot train in place of the worker" in log and "no process around the loop" in log


@pytest.mark.parametrize("environment", [{}, {"COLUMNS": "120", "LINES": "30"}])
def test_the_size_of_the_terminal_is_known_in_a_worker(
    place: Place, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place.script(SIZES)
    result = place.stretto("run", "-n", "1", "--out", "run", "train.py")
    assert result.wait(90) == 0
    size = (120, 30) if environment else (80, 24)
    assert f"sizes {size} {size} {size if environment else (50, 7)}" in Path("run/worker-0.log").read_text()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("Too many open files. Communication with the workers is no longer possible."),
        RuntimeError("received 0 items of ancdata"),
    ],
)
def test_too_few_descriptors_are_named_with_what_to_type(error: Exception) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"a process may open {limit} files: `ulimit -n" in failure(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"),
        RuntimeError(
            "DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit."
        ),
    ],
)
def test_too_small_a_shared_memory_is_named_with_what_to_type(error: Exception) -> None:
    assert "--shm-size" in failure(error)
    assert "--shm-size" not in failure(OSError(errno.ENOSPC, "No space left on device", "/home/model.pt"))


def test_too_few_descriptors_for_the_run_itself_are_refused_before_it_starts(place: Place) -> None:
    place.script("")
    few = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (40, 40)); "
    result = place.stretto("run", "-n", "2", "--recipe", "async_sgd", "--out", "run", "train.py", before=few)
    _, err = result.communicate(timeout=90)
    assert result.returncode == 1 and b"ulimit -n" in err and not Path("run").exists(), err.decode()


LOADS = """
import torch, stretto
data = torch.utils.data.TensorDataset(torch.randn(1024, 512))
net = torch.nn.Linear(512, 1)
loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2)
kept = [x for x, in stretto.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)]
"""


@pytest.mark.plain_processes
@pytest.mark.long
@pytest.mark.parametrize("limit", ["descriptors", "shared memory"])
def test_loader_processes_that_meet_a_limit_end_the_run_with_one_error(place: Place, limit: str) -> None:
    place.recovers = True
    script = place.folder / "train.py"
    script.write_text(LOADS)
    words = ["run", "-n", "2", "--recipe", "allreduce", "--out", str(place.folder / "run"), str(script)]
    few, disk = "", list[str]()
    if limit == "descriptors":
        few = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 64)); "
    else:
        disk = own_disk("600k", Path("/dev/shm"))
    command = [*disk, sys.executable, "-P", "-c", f"{few}import stretto.cli.main as cli; cli.main()", *words]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.count(" failed: ") == 1
    assert ("ulimit -n" if limit == "descriptors" else "--shm-size") in result.stderr
