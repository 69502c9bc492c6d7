"""Private files: what a script reads is as in its own folder, and what it writes reaches no file there."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.launcher import private_files as module
from stretto.launcher.private_files import PrivateFiles, private_files

Snapshot = dict[str, tuple[str, Any]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a script, with data beside it."""
    project = tmp_path / "home" / "project"
    for name in (
        "data/train/0.txt",
        "data/train/1.txt",
        "data/labels.csv",
        "log.csv",
        "best.pt",
        "package/__init__.py",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(f"old {name}\n")
    (project / "train.py").write_text("import package\n")
    (project.parent / "shared").mkdir()
    (project.parent / "shared" / "vocabulary.txt").write_text("a b\n")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "large.bin").write_text("large\n")
    (project / "disk").symlink_to(tmp_path / "disk")
    (project / "newest").symlink_to("data/train")
    (project / "itself").symlink_to(project)
    (project / "absent").symlink_to("nowhere")
    (project / "log.csv").chmod(0o640)
    monkeypatch.chdir(project)
    return project


@pytest.fixture(params=[0, 3, 2000])
def most_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "MOST_LINKS", request.param)
    return int(request.param)


def snapshot(folder: Path) -> Snapshot:
    """Return the contents, modes and times of all files of a folder, and the texts of its links."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith("runs"):
            continue
        if path.is_symlink():
            found[name] = "link", os.readlink(path)
        elif path.is_file():
            found[name] = path.read_text(errors="replace"), (path.stat().st_mode, path.stat().st_mtime_ns)
        else:
            found[name] = "folder", None
    return found


def seen() -> dict[str, str]:
    """Return the text of each file that a script finds as it walks its working folder without following links."""
    return {
        os.path.join(folder, name): Path(folder, name).read_text(errors="replace")
        for folder, _, names in os.walk(".")
        for name in names
        if Path(folder, name).exists() and not folder.startswith("./runs")
    }


@contextlib.contextmanager
def private(project: Path) -> Iterator[tuple[PrivateFiles, list[str]]]:
    """Let this process be a script in private files; the sentences are complete when the block has ended."""
    sentences: list[str] = []
    (project / "runs" / "run").mkdir(parents=True)
    with private_files(
        project / "runs" / "run" / ".files", project / "runs" / "run" / "files", sentences.append
    ) as files:
        yield files, sentences


def test_files_are_read_as_in_the_scripts_own_folder(project: Path, most_links: int) -> None:
    def read() -> list[object]:
        return [
            seen(),
            sorted(os.listdir()),
            sorted(glob.glob("data/**/*.txt", recursive=True)),
            sorted(map(str, Path("data").rglob("*"))),
            Path("../shared/vocabulary.txt").read_text(),
            Path("newest/1.txt").read_text(),
            Path("disk/large.bin").read_text(),
            Path("itself/log.csv").read_text(),
            Path("../../home/project/best.pt").read_text(),
            [os.path.exists("absent"), os.path.lexists("absent"), os.path.isdir("data/train")],
        ]

    (project / "runs").mkdir()
    expected = read()
    with private(project):
        assert read() == expected
    assert not (project / "runs" / "run" / "files").exists()


def truncate() -> None:
    Path("data/train/0.txt").write_text("new")


def append() -> None:
    with open("log.csv", "a") as file:
        file.write("new")


def update_in_place() -> None:
    with open("data/labels.csv", "r+") as file:
        file.write("NEW")


def open_by_number() -> None:
    number = os.open("data/train/1.txt", os.O_WRONLY)
    os.write(number, b"NEW")
    os.close(number)


def write_through_links_of_the_script() -> None:
    Path("newest/0.txt").write_text("new")
    Path("disk/large.bin").write_text("new")
    Path("disk/made.bin").write_text("new")
    Path("itself/best.pt").write_text("new")
    Path("absent").write_text("new")


def make_new_files() -> None:
    os.makedirs("data/train/deep/deeper")
    Path("data/train/deep/made.txt").write_text("new")
    Path("data/made.txt").write_text("new")
    Path("made.txt").write_text("new")


def rename() -> None:
    Path("made.txt").write_text("new")
    os.replace("made.txt", "data/labels.csv")
    os.rename("data/train/0.txt", "data/train/2.txt")
    shutil.move("best.pt", "data/best.pt")


def remove() -> None:
    os.remove("data/train/0.txt")
    os.unlink("log.csv")


def remove_folders() -> None:
    shutil.rmtree("data")
    os.makedirs("data")


def change_modes() -> None:
    os.chmod("data/train/0.txt", 0o600)
    os.truncate("data/train/1.txt", 2)
    os.utime("best.pt", (1, 1))


def copy_over() -> None:
    shutil.copy("data/train/0.txt", "data/train/1.txt")
    shutil.copytree("data", "copied")


CHANGES = (
    truncate,
    append,
    update_in_place,
    open_by_number,
    write_through_links_of_the_script,
    make_new_files,
    rename,
    remove,
    remove_folders,
    change_modes,
    copy_over,
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_have_their_effect_and_reach_no_file_of_the_user(
    project: Path, most_links: int, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = project.parent.parent / "copy" / "home" / "project"
    shutil.copytree(project.parent, copy.parent, symlinks=True)
    shutil.copytree(project.parent.parent / "disk", copy.parent.parent / "disk")
    for name, target in (("disk", copy.parent.parent / "disk"), ("itself", copy)):
        (copy / name).unlink()
        (copy / name).symlink_to(target)
    monkeypatch.chdir(copy)
    change()
    expected = seen(), Path("disk/large.bin").read_text(), sorted(os.listdir("disk"))
    monkeypatch.chdir(project)
    before = snapshot(project.parent.parent / "home"), snapshot(project.parent.parent / "disk")
    with private(project) as (_, sentences):
        change()
        found = seen(), Path("disk/large.bin").read_text(), sorted(os.listdir("disk"))
        own = {name: text for name, text in found[0].items() if not name.startswith("./disk/")}
        assert (own, *found[1:]) == expected
    after = snapshot(project.parent.parent / "home"), snapshot(project.parent.parent / "disk")
    assert {name: was for name, was in after[0].items() if "runs" not in name} == before[0]
    assert after[1] == before[1]
    assert not any("outside" in sentence for sentence in sentences)


def test_written_files_are_kept_alone_and_the_next_trial_does_not_see_them(project: Path) -> None:
    sentences: list[str] = []
    for trial in ("one", "two"):
        run = project / "runs" / trial
        run.mkdir(parents=True)
        with private_files(run / ".files", run / "files", sentences.append):
            assert not Path("checkpoint.pt").exists()
            assert Path("log.csv").read_text() == "old log.csv\n"
            torch.save({"trial": trial}, "checkpoint.pt")
            torch.save({"trial": trial}, Path("best.pt"))
            stretto.save({"trial": trial}, "data/models/last.pt")
            stretto.save({"trial": trial}, "data/labels.csv")
            append()
            Path("newest.pt").symlink_to("checkpoint.pt")
            Path("../above.txt").write_text("new")
        kept = sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())
        names = ("best.pt", "checkpoint.pt", "data/labels.csv", "data/models/last.pt", "log.csv", "newest.pt")
        above = Path("files-above", *project.parent.parts[1:], "above.txt")
        assert kept == sorted([str(above), *(f"files/{name}" for name in names)])
        assert torch.load(run / "files" / "newest.pt")["trial"] == trial
        assert (run / "files" / "log.csv").stat().st_mode & 0o777 == 0o640
    kept_in = [project / "runs" / trial / "files" for trial in ("one", "two")]
    assert sentences == [f"files that the script has written: {one} and {one}-above" for one in kept_in]
    assert not (project.parent / "above.txt").exists()


def test_folder_of_the_script_is_in_the_private_files(project: Path) -> None:
    with private(project) as (files, _):
        for script in (Path("train.py"), files.place(project / "train.py")):
            here = script.resolve().parent
            (here / "beside.txt").write_text("new")
            assert Path("beside.txt").read_text() == "new"
        assert files.place(Path("/elsewhere/train.py")) == Path("/elsewhere/train.py")
    assert not (project / "beside.txt").exists()


def test_files_that_are_reached_otherwise_are_named(project: Path) -> None:
    """Small files are copies, which another program may write; it reaches others by their links."""
    (project / "best.pt").write_bytes(bytes(module.SMALL_BYTES + 1))
    (project / "settings.json").write_text("small")
    with private(project) as (_, sentences):
        (project / "log.csv").write_text("by its absolute path")
        (project / "made.txt").write_text("new")
        (project / "data" / "labels.csv").open("a").close()
        subprocess.run(["sh", "-c", "echo changed > best.pt"], check=True)
        subprocess.run(["sh", "-c", "echo private > settings.json"], check=True)
    assert (project / "settings.json").read_text() == "small"
    (sentence,) = [sentence for sentence in sentences if "outside" in sentence]
    named = sentence.partition(": ")[2].partition(". ")[0].split(", ")
    assert sorted(named) == sorted(map(str, (project / name for name in ("log.csv", "best.pt", "made.txt"))))


def test_large_folders_cost_few_links(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINKS", 50)
    for folder in ("data/images", ".git/objects", "venv/lib"):
        (project / folder).mkdir(parents=True)
        for number in range(200):
            (project / folder / f"{number}.bin").touch()
    (project / "venv" / "pyvenv.cfg").touch()
    files = PrivateFiles(project / "run" / ".files", str(project))
    files.make()
    made = sum(len(folders) + len(names) for _, folders, names in os.walk(files.here))
    assert made < 50 + 30
    assert os.path.isfile(os.path.join(files.here, "data", "images", "7.bin"))
    files.keep(project / "run" / "files")
    assert sorted(os.listdir(project / "run")) == []


@pytest.mark.parametrize("is_unfolded", [True, False])
def test_files_that_a_program_changes_in_a_folder_that_is_one_link_are_named(
    project: Path, is_unfolded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it keeps their sizes and times; files that the run itself writes are not."""
    monkeypatch.setattr(module, "MOST_LINKS", 0)
    (project / "other").mkdir()
    (project / "other" / "run.json").touch()
    with private(project) as (_, sentences):
        if is_unfolded:
            Path("data/train/2.txt").write_text("private")
        command = "printf 'OLD data/train/0.txt\n' > new && touch -r data/train/0.txt new && cat new > data/train/0.txt"
        subprocess.run(["sh", "-c", f"{command} && touch -r new data/train/0.txt"], check=True)
        (project / "runs" / "run" / "events.jsonl").write_text("{}")
        subprocess.run(["sh", "-c", f"echo a > {project}/other/events.jsonl"], check=True)
    assert not (project / "data" / "train" / "2.txt").exists()
    (sentence,) = [sentence for sentence in sentences if "outside" in sentence]
    assert sentence.partition(": ")[2].partition(". ")[0] == str(project / "data" / "train" / "0.txt")


def _append(number: int, barrier: Any) -> None:
    barrier.wait(30)
    with open("log.csv", "a") as file:
        file.write(f"{number}\n")
    os.mkdir(f"data/train/{number}")


def test_processes_that_write_at_the_same_time_lose_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINKS", 0)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    with private(project):
        started = [context.Process(target=_append, args=(number, barrier)) for number in range(4)]
        for process in started:
            process.start()
        for process in started:
            process.join(60)
        assert [process.exitcode for process in started] == [0] * 4
        assert sorted(Path("log.csv").read_text().splitlines()) == ["0", "1", "2", "3", "old log.csv"]
        assert sorted(os.listdir("data/train")) == ["0", "0.txt", "1", "1.txt", "2", "3"]
    assert Path("log.csv").read_text() == "old log.csv\n"


def test_arguments_that_are_folders_or_not_there_yet_lead_into_the_tree(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (elsewhere / "out").mkdir(parents=True)
    (elsewhere / "data.csv").write_text("read")
    project.mkdir()
    (elsewhere / "out" / "kept.txt").write_text("kept")
    stays = ["--lr", "0.1", "/", "/think", "a/b", "https://host/a", "--null=/dev/null", f"--data={elsewhere}/data.csv"]
    own = [f"{elsewhere}/out", f"--out={elsewhere}/out", f"dir={elsewhere}/new/deeper"]
    given = [*stays, *own]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(project)
        with private(project) as (files, sentences):
            found = files.arguments(given)
            assert found[: len(stays)] == stays
            assert [
                one.replace(str(files.place(project).parent).removesuffix(str(tmp_path)), "") for one in found
            ] == given
            first, _, third = found[len(stays) :]
            new = Path(third.removeprefix("dir="))
            assert [Path(first).resolve(), new.resolve()] == [Path(first), new]
            assert Path(first, "kept.txt").read_text() == "kept"
            Path(first, "kept.txt").write_text("changed")
            new.mkdir(parents=True)
            (new / "model.pt").write_text("model")
    assert (elsewhere / "out" / "kept.txt").read_text() == "kept"
    assert not (elsewhere / "new").exists()
    above = Path(f"{project}/runs/run/files-above{elsewhere}")
    assert {one.name for one in above.rglob("*.*")} == {"kept.txt", "model.pt"}
    assert sentences == [f"files that the script has written: {project}/runs/run/files-above"]
