"""Properties of a run on this machine, with real processes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from fixed_ports import fixed_port
from run_place import Place

from stretto.errors import LaunchError, RecipeError, StrettoError
from stretto.launcher import process_specs
from stretto.launcher.engines import local as processes
from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.process_config import OF_TORCHRUN, RECIPE, VARIABLE, worker_config
from stretto.run_config import RunConfig


def test_environment_of_a_worker_has_its_rank_and_rendezvous(place: Place) -> None:
    folder = place.run(
        """
        import json, os
        names = json.dumps(dict(os.environ))
        open(f"environment-{config.worker}.json", "w").write(names)
        """,
        workers=3,
        recipe="local_sgd(every=4)",
        seed=7,
        timeout_s=12.5,
        keep_states=True,
        threads=2,
    )
    for rank in range(3):
        given = json.loads(Path(f"environment-{rank}.json").read_text())
        config = worker_config(given)
        assert config is not None and config.store is not None
        assert (config.worker, config.world_size) == (rank, 3)
        assert config.store.startswith("127.0.0.1:")
        assert not set(OF_TORCHRUN) & set(given), "other libraries would open a process group"
        assert config.run == str(folder.resolve())
        options = config.options
        assert (options.recipe, options.seed, options.timeout_s) == ("local_sgd(every=4)", 7, 12.5)
        assert options.keep_states
        assert given["OMP_NUM_THREADS"] == "2"
        assert (options.single_process, options.global_batch_of) == (False, 1)
        assert (config.listen_fd is not None) == (rank == 0)


def test_worker_records_schedulers_in_the_order_of_their_creation(place: Place) -> None:
    place.run(
        """
        import gc
        import torch
        from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        linear = LinearLR(optimizer)
        gc.collect()
        cosine = CosineAnnealingLR(optimizer, 5)
        from stretto.training.schedulers import schedulers_of
        assert schedulers_of(optimizer) == [linear, cosine]
        """
    )


def test_variables_of_another_run_are_removed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, RECIPE, *OF_TORCHRUN):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("STRETTO_DATA", "here")
    given = process_specs.environment_of(1, RunConfig(Path("train.py"), workers=2))
    left = {name for name in given if name.startswith("STRETTO_") and name != "STRETTO_TEST_MARK"}
    assert not set(OF_TORCHRUN) & set(given)
    assert left == {"STRETTO_DATA"}


def test_cores_are_divided_among_workers_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(**order: int) -> str:
        given = process_specs.environment_of(0, RunConfig(Path("train.py"), **order))  # type: ignore[arg-type]
        return given["OMP_NUM_THREADS"]

    monkeypatch.setattr("stretto.run_config.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads(workers=n) for n in (1, 3, 8, 100)] == ["8", "2", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert (threads(workers=2), threads(workers=2, threads=3)) == ("5", "3")


def test_gpus_are_assigned_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(worker: int) -> str | None:
        given = process_specs.environment_of(worker, RunConfig(Path("train.py"), workers=4))
        return given.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7,2")
    assert [devices(worker) for worker in range(4)] == ["4", "GPU-7", "2", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5c3b,MIG-GPU-7f/1/0")
    assert [devices(worker) for worker in range(3)] == ["MIG-5c3b", "MIG-GPU-7f/1/0", "MIG-5c3b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices(0) == ""
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-caps"):
        (tmp_path / name).touch()
    assert process_specs.gpus({}, tmp_path) == ["0", "2", "10"]


def test_workers_connect_to_the_socket_that_worker_0_inherits(place: Place) -> None:
    place.run(
        """
        import os, socket
        port = config.store_address[1]
        if config.worker == 0:
            listener = socket.socket(fileno=config.listen_fd)
            assert listener.getsockname() == ("127.0.0.1", port)
            listener.accept()[0].send(b"welcome")
        else:
            assert socket.create_connection(("127.0.0.1", port)).recv(7) == b"welcome"
        """,
        workers=2,
    )


def test_script_runs_as_under_python(place: Place) -> None:
    folder = place.run(
        """
        import sys
        import beside
        assert __name__ == "__main__" and sys.modules["__main__"].beside is beside
        assert sys.argv[1:] == ["--lr", "0.1", "a b"], sys.argv
        assert sys.path[0] == beside.HERE
        assert __file__ == beside.HERE + "/train.py"
        assert sys.stdin.read() == ""
        """
        if (place.folder / "beside.py").write_text(f"HERE = {str(place.folder)!r}\n")
        else "",
        "--lr",
        "0.1",
        "a b",
    )
    written = json.loads((folder / "run.json").read_text())
    assert (written["args"], written["workers"], written["single_process"], written["global_batch_of"]) == (
        ["--lr", "0.1", "a b"],
        1,
        False,
        1,
    )
    assert written["versions"]["python"] == ".".join(map(str, __import__("sys").version_info[:3]))
    assert written["machine"]["cores"] >= 1


def test_names_of_the_script_exist_after_its_end(place: Place) -> None:
    """The model that `finish` evaluates may have to be pickled by name."""
    text = """
        import sys
        stub.api.close = lambda: print("found", sys.modules["__main__"].accuracy())
        def accuracy():
            return 17
        {end}
        """
    for end in ("", "sys.exit(0)"):
        folder = place.run(text.format(end=end))
        assert "found 17" in (folder / "worker-0.log").read_text()


FLOOD = """
import os, sys
for number in range(3000):
    print(f"{config.worker}:{number}:" + "x" * 90)
    print(f"{config.worker}:{number}:error", file=sys.stderr)
print("end", end="")
"""


@pytest.mark.parametrize("output", ["rank0", "all", "none"])
def test_no_line_is_lost_and_no_pipe_stays_full(place: Place, output: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = place.run(FLOOD, workers=3, output=output)
    logs = [(folder / f"worker-{rank}.log").read_text() for rank in range(3)]
    for rank, log in enumerate(logs):
        lines = [f"{rank}:{n}:{rest}" for n in range(3000) for rest in ("x" * 90, "error")]
        assert log == "\n".join([*lines, "end"])
    shown = capfd.readouterr().out
    if output == "all":
        found = [[line[4:] for line in shown.splitlines() if line.startswith(f"[{n}] ")] for n in range(3)]
        assert found == [log.splitlines() for log in logs]
    else:
        assert shown == (logs[0] if output == "rank0" else "")


def test_lines_are_shown_when_they_end(place: Place) -> None:
    """The output is a pipe, which Python buffers in blocks by default."""
    place.run(
        """
        import os, pathlib, time
        print("seen")
        log = pathlib.Path(config.run, "worker-0.log")
        limit = time.monotonic() + 60
        while not log.exists() or log.read_text() != "seen\\n":
            assert time.monotonic() < limit
            time.sleep(0.01)
        """
    )


@pytest.mark.parametrize(
    ("order", "error", "words"),
    [
        ({"workers": 0}, LaunchError, ("number of workers", "got: 0", "try: -n 4")),
        ({"workers": -3}, LaunchError, ("number of workers", "got: -3")),
        ({"threads": 0}, LaunchError, ("number of threads", "got: 0")),
        ({"seed": -1}, LaunchError, ("the seed", "got: -1")),
        ({"timeout_s": 0.0}, LaunchError, ("limit of a wait", "--timeout 600")),
        ({"port": 70000}, LaunchError, ("the port", "got: 70000")),
        ({"single_process": True, "workers": 2}, LaunchError, ("alone means one worker", "got: 2")),
        ({"servers": 2}, LaunchError, ("--servers needs --recipe", "got: --servers 2", "try: --recipe")),
        ({"recipe": "async_sgd", "servers": 0}, LaunchError, ("number of servers", "got: 0", "try: --servers 2")),
        ({"recipe": "async_sgd", "servers": -1}, LaunchError, ("number of servers", "got: -1")),
        ({"recipe": "async_sgd", "servers": 300}, RecipeError, ("shards", "300", "at most 256")),
        ({"stragglers": "1:2.0"}, LaunchError, ("there is no worker 1 of 1", "try: --stragglers")),
        ({"failure_timeout_s": 0.01}, LaunchError, ("the failure timeout", "got: 0.01s", "try: --failure-timeout 10s")),
        ({"failure_timeout_s": float("inf")}, LaunchError, ("the failure timeout", "got: infs")),
        (
            {"workers": 2, "min_workers": 3},
            LaunchError,
            ("minimum number of workers", "from 1 to 2", "--min-workers 2"),
        ),
        ({"workers": 2, "min_workers": 0}, LaunchError, ("minimum number of workers", "got: 0")),
        ({"workers": 2, "max_workers": 1}, LaunchError, ("largest number of workers", "got: 1", "--max-workers 2")),
        ({"restarts": -1}, LaunchError, ("number of restarts", "got: -1", "try: --restarts 3")),
        ({"checkpoint_every": "often"}, LaunchError, ("got: often", "20 rounds", 'try: --checkpoint-every "5m"')),
        ({"checkpoint_every": "0s"}, LaunchError, ("got: 0s",)),
        ({"checkpoint_every": "0 rounds"}, LaunchError, ("got: 0 rounds",)),
        (
            {"keep": 2, "checkpoint_every": "never"},
            LaunchError,
            ("--keep changes nothing", "--checkpoint-every 5m --keep 2"),
        ),
        ({"workers": 2, "recovery": False, "keep": 2}, LaunchError, ("--keep changes nothing",)),
        (
            {"resume_stream": "skip"},
            LaunchError,
            ("--resume-stream changes nothing without --resume", "--resume runs/RUN --resume-stream skip"),
        ),
        ({"keep": 0, "checkpoint_every": "5m"}, LaunchError, ("number of checkpoints", "got: 0")),
        (
            {"workers": 2, "stop_within_s": 9.0, "checkpoint_every": "never"},
            LaunchError,
            ("got: --stop-within 9s --checkpoint-every never", "-n 2 --stop-within 25s"),
        ),
        ({"stop_within_s": 9.0}, LaunchError, ("got: --stop-within 9s", "-n 2 --stop-within 25s")),
        ({"resume": Path("none")}, LaunchError, ("there is no run none", "try: --resume")),
        ({"resume": Path(".")}, LaunchError, (". has no checkpoints",)),
        ({"recipe": "local_sdg(every=4)"}, RecipeError, ("local_sdg", "try: ")),
        ({"recipe": "__import__('os').system('touch ran')"}, RecipeError, ("try: ",)),
        ({"out": Path("/dev/null/x")}, StrettoError, ("/dev/null/x",)),
    ],
)
def test_invalid_run_is_refused_before_any_process_starts(
    place: Place, order: dict[str, object], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        place.run("open('ran', 'w')", **order)
    assert all(word in str(raised.value) for word in words)
    assert not Path("ran").exists()
    assert not Path("runs").exists()


def test_a_run_without_a_complete_checkpoint_is_not_resumed(place: Place) -> None:
    Path("before/checkpoints/round-00000003").mkdir(parents=True)
    with pytest.raises(LaunchError, match="there is no complete checkpoint in before") as raised:
        place.run("open('ran', 'w')", resume=Path("before"))
    assert "round-00000003/manifest.json cannot be read" in str(raised.value)
    with pytest.raises(LaunchError, match="there is no run befor") as raised:
        place.run("open('ran', 'w')", resume=Path("befor"))
    assert "try: --resume runs/RUN" in str(raised.value) and "near it" not in str(raised.value)
    assert not Path("ran").exists() and not Path("runs").exists()


def test_port_in_use_is_refused_by_number(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is in use"):
            place.run("", port=port)
    assert not Path("runs").exists()


def test_given_port_is_the_rendezvous_port(place: Place) -> None:
    port = fixed_port()
    folder = place.run("print(config.store_address[1])", port=port)
    assert (folder / "worker-0.log").read_text() == f"{port}\n"


def test_missing_script_is_refused_with_similar_names(place: Place) -> None:
    place.script("", "train_digits.py")
    with pytest.raises(LaunchError, match=r"there is no script train_digit\.py") as raised:
        run(RunConfig(Path("train_digit.py")), ProgressDisplay(quiet=True))
    assert "try: stretto run train_digits.py" in str(raised.value)
    with pytest.raises(LaunchError, match="is a folder"):
        run(RunConfig(place.folder), ProgressDisplay(quiet=True))


def test_failure_to_start_a_process_is_reported_and_started_ones_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = processes.subprocess.Popen

    def fail_at_the_third(command: list[str], **options: object) -> object:
        if '"worker":2' in options.get("env", {}).get(VARIABLE, ""):  # type: ignore[attr-defined]
            raise BlockingIOError(11, os.strerror(11))
        return begin(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(processes.subprocess, "Popen", fail_at_the_third)
    with pytest.raises(LaunchError, match="worker 2 of 4 cannot be started: Resource temporarily"):
        place.run("import time; time.sleep(600)", workers=4)
    place.await_ends()


def test_files_of_the_current_folder_do_not_shadow_modules(place: Place) -> None:
    """A file named like a module of the library, in the folder of another script, is not imported by the launcher."""
    (place.folder / "runpy.py").write_text("raise RuntimeError('taken')")
    elsewhere = place.folder / "scripts"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("import sys, types\nsys.modules['stretto.api'] = sys\nsys.close = print")
    run(RunConfig(elsewhere / "train.py"), ProgressDisplay(quiet=True))
