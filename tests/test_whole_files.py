"""Files that are written whole, and what a path may name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import stretto
from stretto.errors import LogError
from stretto.report.run_record import write_json
from stretto.whole_files import is_stream, written_whole


def write(path: Path, text: str) -> None:
    with written_whole(path) as part:
        part.write_text(text)


@pytest.mark.parametrize("links", [1, 3])
@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_links_stay_and_the_file_behind_them_is_replaced(tmp_path: Path, links: int, exists: bool) -> None:
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk" / "best.pt"
    if exists:
        target.write_text("old")
        target.chmod(0o640)
    place = Path("disk/best.pt")
    for number in range(links):
        (tmp_path / f"link{number}").symlink_to(place)
        place = Path(f"link{number}")
    write(tmp_path / place, "new")
    assert target.read_text() == "new"
    assert all((tmp_path / f"link{number}").is_symlink() for number in range(links))
    assert not exists or target.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path / "disk")) == ["best.pt"]


def test_file_behind_a_link_is_whole_or_as_before(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "link"):
        (tmp_path / "absent").read_bytes()
    assert (tmp_path / "real").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="[Ss]ymbolic link"):
        write(tmp_path / "a", "new")
    with pytest.raises(LogError, match="cannot be written"):
        write_json(tmp_path / "a", {})
    assert (tmp_path / "a").is_symlink() and (tmp_path / "b").is_symlink()


def test_devices_and_links_to_them_stay(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        assert is_stream(path)
        stretto.save({"a": torch.ones(3)}, path)
        write_json(path, [1])
    assert Path("/dev/null").is_char_device() and (tmp_path / "null").is_symlink()
    with pytest.raises(LogError, match="No space left"):
        write_json(Path("/dev/full"), [1])


def test_pipe_receives_the_whole_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    stretto.save({"a": torch.ones(3)}, tmp_path / "pipe")
    reader.join(timeout=30)
    (tmp_path / "copy").write_bytes(received[0])
    assert torch.load(tmp_path / "copy")["a"].tolist() == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["copy", "pipe"]


def test_file_that_the_standard_output_is_redirected_to_keeps_what_was_printed(tmp_path: Path) -> None:
    text = (
        "from pathlib import Path\nfrom stretto.whole_files import written_whole\nprint('before')\n"
        "with written_whole(Path('/dev/stdout')) as part:\n    part.write_text('whole\\n')\nprint('after')\n"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", text], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "before\nwhole\nafter\n"
