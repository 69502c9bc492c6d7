"""Tests of the manifests for Kubernetes by its schema, and of their commands as processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engine_runs import assert_each_sample_counts_once, script

from stretto.launcher.kubernetes import SECRET, PodOptions, commands, manifests
from stretto.run_config import RunConfig

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 40


def test_manifests_are_those_of_the_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    import yaml

    config = RunConfig(Path("/app/train.py"), workers=4, recipe="diloco(every=50)")
    objects = list(yaml.safe_load_all(manifests(config, PodOptions("registry/me:1", "mine", gpus=1))))
    assert [one["kind"] for one in objects] == ["Secret", "Secret", "Service", "Job", "Job"]
    for one in objects:
        validate.validate(one, validate.latest_version(), strict=True)
    objects[-1]["spec"]["paralelism"] = 4
    with pytest.raises(validate.ValidationError):
        validate.validate(objects[-1], validate.latest_version(), strict=True)


def test_commands_of_the_manifests_train_together(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "train.py").write_text(script(epochs=EPOCHS))
    config = RunConfig(tmp_path / "app" / "train.py", workers=2, recipe="local_sgd(every=2)", out=tmp_path / "run")
    made = commands(config, address, address, str(tmp_path))
    for name, text in ((SECRET, made.secret), ("join.key", made.key)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o400)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(words: list[str], folder: str) -> subprocess.Popen[bytes]:
        (tmp_path / folder).mkdir()
        command = [sys.executable, "-m", "stretto.cli", *words[1:]]
        return subprocess.Popen(command, cwd=tmp_path / folder, env=environment)

    head = start(list(made.head), "head")
    try:
        while not (tmp_path / "run" / "join.key").exists():
            assert head.poll() is None
        pods = [start(list(made.worker), name) for name in ("pod-0", "pod-1")]
        assert [one.wait(90) for one in (head, *pods)] == [0, 0, 0]
    finally:
        head.kill()
    assert_each_sample_counts_once([tmp_path / "run"], EPOCHS)
