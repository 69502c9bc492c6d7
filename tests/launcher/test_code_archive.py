"""Code that a joining machine receives: all that the script may import, nothing that a `.gitignore` names."""

from __future__ import annotations

import io
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from stretto.errors import LaunchError
from stretto.launcher.code_archive import packed, unpack


def written(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def sent(folder: Path, to: Path) -> list[str]:
    unpack(packed(folder / "train.py"), to)
    return names(to)


def test_modules_beside_the_script_arrive_unchanged(tmp_path: Path) -> None:
    here = written(tmp_path / "here", train_py="import nets.small", nets__small_py="x = 'ü'\n", nets__words="a")
    assert sent(here, tmp_path / "there") == ["nets/small.py", "nets/words", "train.py"]
    assert (tmp_path / "there/nets/small.py").read_bytes() == (here / "nets/small.py").read_bytes()


def test_ignored_hidden_compiled_and_linked_files_stay(tmp_path: Path) -> None:
    here = written(tmp_path / "here", train_py="", data__big="0", nets__small_py="", nets__tmp="0", nets__keep="1")
    written(here, secret="0", out__worker="0")
    (here / "out/run.json").write_text("{}")
    (here / ".env").write_text("KEY=1")
    (here / "nets/__pycache__").mkdir()
    (here / "nets/__pycache__/small.cpython-311.pyc").write_bytes(b"")
    (here / "linked").symlink_to("/etc/passwd")
    (here / "folder").symlink_to("/etc")
    (here / ".gitignore").write_text("data/\n/secret\n")
    (here / "nets/.gitignore").write_text("*\n!*.py\n!keep\n")
    assert sent(here, tmp_path / "there") == ["nets/keep", "nets/small.py", "train.py"]


@pytest.mark.parametrize(
    ("top", "between", "own", "expected"),
    [
        ("data/\nsecrets.json\n", "", "", ["small.bin", "train.py"]),
        ("*.bin\ndata/\n", "", "!*.bin\n!data/\n", ["data/a.bin", "secrets.json", "small.bin", "train.py"]),
        ("*.bin\ndata/\n", "", "!*.bin\n", ["secrets.json", "small.bin", "train.py"]),
        ("*.bin\n", "!*.bin\n", "a.bin\n", ["secrets.json", "small.bin", "train.py"]),
        ("/train.py\n/data/\n", "/code/*.json\n", "", ["data/a.bin", "small.bin", "train.py"]),
        ("*\n!*/\n!*.py\n", "", "", ["train.py"]),
        ("*\n!*/\n!*.py\n", "", "!data/*\n", ["data/a.bin", "train.py"]),
    ],
)
def test_ignore_files_above_count_as_in_git(
    tmp_path: Path, top: str, between: str, own: str, expected: list[str]
) -> None:
    here = written(tmp_path / "repository/project/code", train_py="", data__a="", secrets="", small="")
    for old, new in (("data/a", "data/a.bin"), ("secrets", "secrets.json"), ("small", "small.bin")):
        (here / old).rename(here / new)
    subprocess.run(["git", "init", "-q", tmp_path / "repository"], check=True)
    (tmp_path / ".gitignore").write_text("*\n")  # outside of the repository
    for folder, text in ((here.parent.parent, top), (here.parent, between), (here, own)):
        (folder / ".gitignore").write_text(text)
    listed = subprocess.run(
        ["git", "ls-files", "-oc", "--exclude-per-directory=.gitignore"], cwd=here, check=True, capture_output=True
    )
    assert [name for name in listed.stdout.decode().split() if name != ".gitignore"] == expected
    assert sent(here, tmp_path / "there") == expected


@pytest.mark.parametrize("line", ["code/", "/project/", "*"])
def test_folder_that_its_repository_ignores_is_sent(tmp_path: Path, line: str) -> None:
    here = written(tmp_path / "project/code", train_py="", secrets="", data__big="")
    (tmp_path / ".git").touch()  # as in a worktree
    (tmp_path / ".gitignore").write_text(f"{line}\nsecrets\ndata/\n")
    assert sent(here, tmp_path / "there") == ["train.py"]


def test_code_that_is_too_large_is_refused_with_its_largest_file(tmp_path: Path) -> None:
    here = written(tmp_path, train_py="", data__big="0" * 2000)
    with pytest.raises(LaunchError, match=r"largest file is data/big\n  got: 0.0 MB\n  expected: at most 0.0 MB"):
        packed(here / "train.py", largest_bytes=1000)


def test_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("../out.py", "x")
        archive.writestr("/abs.py", "x")
    unpack(data.getvalue(), tmp_path / "a/b")
    assert names(tmp_path) == ["a/b/abs.py", "a/b/out.py"]
    assert not os.path.exists("/abs.py")


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\n"
PUBLIC = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
JOIN_KEY = f'{{"address":"127.0.0.1:7878","keys":["{PUBLIC}","{PUBLIC}","{PUBLIC}"]}}'


def test_secrets_stay_whatever_their_names_are_and_are_named(tmp_path: Path) -> None:
    secret = "5f" * 32
    here = written(tmp_path / "here", train_py=f"# {KEY.split()[0]} PRIVATE KEY-----", run__secret=secret + "\n")
    written(here, copied=f"text\n{secret}", words=KEY, folder__join=JOIN_KEY, mine="for me", data="for all")
    os.link(here / "run/secret", here / "linked")
    (here / "mine").chmod(0o600)
    stayed = unpack(packed(here / "train.py", [secret]), tmp_path / "there")
    assert names(tmp_path / "there") == ["data", "train.py"]
    assert [text.split(" (")[0] for text in stayed.split(", ")] == [
        "copied", "folder/join", "linked", "mine", "run/secret", "words",
    ]  # fmt: skip
    assert secret not in stayed


def test_a_folder_of_files_for_one_user_is_sent(tmp_path: Path) -> None:
    here = written(tmp_path / "here", train_py="", data="0")
    for name in ("train.py", "data"):
        (here / name).chmod(0o600)
    assert sent(here, tmp_path / "there") == ["data", "train.py"]
