"""Tests of the manifests for Kubernetes; `tests/engines/test_kubernetes.py` checks them and runs their commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from stretto.cli import main
from stretto.errors import LaunchError
from stretto.launcher.join import JoinKey, given_secret
from stretto.launcher.kubernetes import PodOptions, manifests
from stretto.run_config import RunConfig
from stretto.security import RunKeys

CONFIG = RunConfig(Path("/app/train.py"), ("--lr", "0.1"), workers=4, recipe="local_sgd(every=4)")


def secrets_in(text: str) -> dict[str, str]:
    """Return the content of the secrets by the name of their file."""
    found = re.findall(r"^stringData: (.*)$", text, flags=re.M)
    return {name: value for one in found for name, value in json.loads(one).items()}


def test_commands_are_words_that_no_shell_reads_and_hold_no_key() -> None:
    text = manifests(CONFIG, PodOptions("registry/me:1", "mine", gpus=2))
    head, worker = (json.loads(one) for one in re.findall(r"^ +command: (.*)$", text, flags=re.M))
    assert head[:6] == ["stretto", "run", "-n", "0", "--listen", "$(POD_IP):7878"]
    typed = ["--recipe", "local_sgd(every=4)", "--stop-within", "45s", "/app/train.py", "--lr", "0.1"]
    assert sorted(head[-7:-3]) == sorted(typed[:4]) and head[-3:] == typed[4:]
    assert worker[:5] == ["stretto", "join", "mine-head:7878", "--key", "/var/run/stretto/join.key"]
    kept = secrets_in(text)
    assert not any(part in " ".join([*head, *worker]) for part in (kept["secret"], kept["join.key"]))
    assert text.count('"nvidia.com/gpu": 2') == 2
    assert "completions: 4" in text


def test_kubernetes_expands_no_word_of_the_script() -> None:
    """It replaces $(NAME) by a variable's value, and $$ by $."""
    words = ("--note", "$(POD_IP) costs $5 or $$")
    text = manifests(replace(CONFIG, args=words), PodOptions("i", "mine"))
    head = json.loads(re.findall(r"^ +command: (.*)$", text, flags=re.M)[0])
    expanded = [re.sub(r"\$\$|\$\((\w+)\)", lambda found: "value" if found[1] else "$", word) for word in head]
    assert tuple(expanded[-2:]) == words
    assert expanded[5] == "value:7878"


def test_key_of_the_workers_is_that_of_the_secret_and_of_nothing_else() -> None:
    kept = secrets_in(manifests(CONFIG, PodOptions("i", "mine")))
    key = json.loads(kept["join.key"])
    assert key["address"] == "mine-head:7878"
    assert tuple(key["keys"]) == RunKeys(kept["secret"]).client(b"joining").texts
    assert set(key) == set(JoinKey.__struct_fields__)
    assert kept["secret"] != secrets_in(manifests(CONFIG, PodOptions("i", "mine")))["secret"]


@pytest.mark.parametrize("name", ["My-run", "1run", "run_1", "run-", "r" * 60])
def test_name_that_kubernetes_refuses_is_an_error(name: str) -> None:
    with pytest.raises(LaunchError, match="try: --name my-run"):
        manifests(CONFIG, PodOptions("i", name))


def test_command_without_an_image_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(["kubernetes", "-n", "2", "train.py"]) == 2
    assert "--image" in capsys.readouterr().err


def test_secret_file_that_others_can_read_or_that_holds_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("ab" * 32)
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="may be known to others"):
        given_secret(path)
    path.chmod(0o600)
    assert given_secret(path) == "ab" * 32
    path.write_text("too short")
    with pytest.raises(LaunchError, match="holds no secret of a run"):
        given_secret(path)
    with pytest.raises(LaunchError, match="cannot be read"):
        given_secret(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--secret-file", "s"], "only a run that others join"),
        (["--secret-file", "s", "--listen", "127.0.0.1", "--no-encryption"], "has no secret"),
    ],
)
def test_secret_that_changes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main.command(["run", *options, "train.py"]) == 1
    assert text in capsys.readouterr().err
