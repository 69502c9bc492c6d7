"""Every example is a plain script: it trains alone, and the one line changes nothing of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 300
DIGEST = """
import hashlib, torch
flat = torch.cat([value.flatten() for value in model.state_dict().values()])
print(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
"""


def run(script: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, started as a person would."""
    alone = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "STRETTO_CONFIG")}
    command = [sys.executable, str(script), *args]
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**alone, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def last(metric: str, said: str) -> float:
    return float(re.findall(rf"{metric} ([\d.]+)", said)[-1])


def missing_data(*names: str) -> list[str]:
    """Return the files of these that are not there: tests don't download."""
    folder = Path(os.environ.get("STRETTO_DATA", "nowhere"))
    return [name for name in names if not (folder / name).is_file()]


def needs(*names: str) -> None:
    """Skip without the data."""
    if missing := missing_data(*names):
        pytest.skip(f"STRETTO_DATA has no {missing[0]}")


def test_digits_learns_alone():
    ended = run(EXAMPLES / "digits.py")
    assert ended.returncode == 0, ended.stderr
    assert last("test_accuracy", ended.stderr) >= 0.95


def test_mnist_runs():
    needs("mnist/train-images-idx3-ubyte.gz", "mnist/t10k-labels-idx1-ubyte.gz")
    ended = run(EXAMPLES / "mnist.py", "--epochs", "1", "--samples", "64")
    assert ended.returncode == 0, ended.stderr
    assert 0 <= last("test_accuracy", ended.stderr) <= 1


def test_shakespeare_runs_and_learns():
    needs("tinyshakespeare/input.txt")
    small = ("--layers", "1", "--width", "32", "--characters", "50000")
    ended = run(EXAMPLES / "shakespeare.py", *small, "--epochs", "2")
    assert ended.returncode == 0, ended.stderr
    assert last("validation_loss", ended.stderr) < 4.17  # less than a uniform guess among 65 characters


def test_recommender_learns_movielens():
    needs("ml-latest-small/ratings.csv")
    ended = run(EXAMPLES / "recommender.py", "--epochs", "1")
    assert ended.returncode == 0, ended.stderr
    assert last("test_rmse", ended.stdout) < 0.96  # the mean alone has 1.06


STRETTO = "import sys; from stretto.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("script", "recipe", "options"),
    [
        ("digits.py", "local_sgd(every=4)", ["--epochs", "2"]),
        ("mnist.py", "diloco(every=4)", ["--epochs", "1", "--samples", "640"]),
        ("shakespeare.py", "allreduce", ["--layers", "1", "--width", "32", "--characters", "20000"]),
        ("recommender.py", "async_sgd(shards=2)", ["--epochs", "1", "--ratings", "20000"]),
    ],
)
def test_two_workers_run_it(script, recipe, options, tmp_path):
    if script in ("mnist.py", "shakespeare.py"):
        needs("mnist/train-images-idx3-ubyte.gz", "tinyshakespeare/input.txt")
    command = [sys.executable, "-c", STRETTO, "run", "-n", "2", "--recipe", recipe]
    command += ["--out", str(tmp_path / "run"), str(EXAMPLES / script), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    if script == "recommender.py" and not missing_data("ml-latest-small/ratings.csv"):
        assert last("test_rmse", ended.stdout) < 1.05  # the mean alone has 1.11


@pytest.mark.parametrize("script", ["mnist.py", "shakespeare.py"])
def test_without_data_a_script_ends_with_one_error(script, tmp_path):
    closed = {"https_proxy": "http://127.0.0.1:9", "XDG_CACHE_HOME": str(tmp_path), "STRETTO_DATA": ""}
    ended = run(EXAMPLES / script, **closed)
    assert ended.returncode == 1
    assert "could not be downloaded" in ended.stderr
    assert "Traceback" not in ended.stderr


def without_the_line(source: str) -> str:
    return "".join(line for line in source.splitlines(keepends=True) if "stretto" not in line)


def test_the_line_alone_changes_no_bit(tmp_path):
    source = (EXAMPLES / "digits.py").read_text()
    with_line, plain = tmp_path / "with_line.py", tmp_path / "plain.py"
    with_line.write_text(source + DIGEST)
    plain.write_text(without_the_line(source) + DIGEST)
    digests = [run(script, "--epochs", "2").stdout for script in (with_line, plain)]
    assert digests[0] == digests[1] != ""


@pytest.mark.parametrize("script", ["digits.py", "mnist.py", "shakespeare.py", "recommender.py"])
def test_an_example_is_a_plain_loop_and_one_line(script):
    source = (EXAMPLES / script).read_text()
    calls = re.findall(r"stretto\.(\w+)\(", source)
    assert calls == ["distribute", "log"]
    compile(without_the_line(source), script, "exec")
