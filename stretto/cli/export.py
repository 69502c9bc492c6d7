"""The command `stretto export`: the model of a run as a plain state_dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.checkpoint.model_file import FINAL, ModelFile, in_section
from stretto.errors import LaunchError, LogError, explain
from stretto.report.run_record import STANDARD_OUTPUT, check_target, write_json
from stretto.run_dir import CHECKPOINTS
from stretto.whole_files import is_stream, written_whole

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model/"
"""Prefix of the names of the model's tensors in a checkpoint."""
TARGET = "model.safetensors"
TORCH_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True)
class Exported:
    """Result of an export; `round` is that of the checkpoint, or None for the final state of the run.

    `epoch`, `step` and `cause` are those of the last model of a run that did not complete.
    """

    run: str
    file: str
    round: int | None
    tensors: int
    numbers: int
    bytes: int
    epoch: int | None = None
    step: int | None = None
    cause: str | None = None

    def __str__(self) -> str:
        source = "the final state of the run" if self.round is None else f"the checkpoint of round {self.round}"
        if self.cause is not None:
            source = (
                f"the last model on which the workers of an incomplete run agreed, after epoch {self.epoch}, step "
                f"{self.step}; the run ended by: {self.cause}"
            )
        return f"{self.file}: {self.tensors} tensors, {self.numbers} numbers, from {source}"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file to write: safetensors, or torch.save's for a name with .pt or .pth."
        ),
    ],
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    json_to: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="File for a description of the export; - for the standard output."),
    ] = None,
) -> None:
    """Write the model of RUN as a plain state_dict that any PyTorch program can load.

    The model is that of the final state of the run; of an incomplete run the last one on which the workers agreed, or
    that of the newest complete checkpoint, whichever is newer.
    """
    check_target(json_to, "export.json")
    to_standard_output = str(json_to) == STANDARD_OUTPUT
    exported = export(run, out, force=force, notice=lambda text: typer.echo(f"stretto: {text}", err=True))
    typer.echo(str(exported), err=to_standard_output)
    if json_to is not None:
        write_json(json_to, asdict(exported))


def export(run: Path, out: Path, force: bool = False, notice: Callable[[str], object] = print) -> Exported:
    """Write the model of a run to a file. Damaged files are skipped with a notice.

    Raises LaunchError for an unusable run or target, and LogError when all states of the run are damaged.
    """
    _check(run, out, force)
    found, round_, tensors = _model(run, notice)
    try:
        _write(out, tensors)
    except OSError as error:
        raise LogError(f"{out} cannot be written: {error.strerror}") from error
    numbers = sum(tensor.numel() for tensor in tensors.values())
    last = (found.epoch, found.step, found.cause) if found is not None else ()
    return Exported(str(run), str(out), round_, len(tensors), numbers, out.stat().st_size, *last)


def _check(run: Path, out: Path, force: bool) -> None:
    if not run.is_dir():
        problem, expected = f"there is no run {run}", "the folder of a run"
        raise LaunchError(explain(problem, got=run, expected=expected, to_type=f"stretto export runs/RUN {out}"))
    if not out.parent.is_dir():
        problem, expected = f"there is no folder {out.parent}", "a file in a folder that exists"
        raise LaunchError(explain(problem, got=out, expected=expected, to_type=f"stretto export {run} {TARGET}"))
    if (out.exists() and not out.is_file()) or is_stream(out):
        problem, expected = f"{out} is not a file", "the name of a file"
        to_type = f"stretto export {run} {out / TARGET if out.is_dir() else TARGET}"
        raise LaunchError(explain(problem, got=out, expected=expected, to_type=to_type))
    if out.exists() and not force:
        problem, expected = f"{out} exists", "a new file, or --force to overwrite it"
        raise LaunchError(explain(problem, got=out, expected=expected, to_type=f"stretto export {run} {out} --force"))


def _model(run: Path, notice: Callable[[str], object]) -> tuple[ModelFile | None, int | None, dict[str, Tensor]]:
    """Return the newest model of a run: its file, or the round of its checkpoint, and the tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from stretto.checkpoint.storage import Checkpoints

    damaged: list[str] = []

    def skip(text: str) -> None:
        damaged.append(text)
        notice(text)

    found, tensors = in_section(run), dict[str, "Tensor"]()
    if found is not None:
        try:
            tensors = load_file(found.path)
        except (OSError, RuntimeError, SafetensorError) as error:
            skip(f"{found.path} is damaged: {error}")
            found = None
    if found is not None and found.is_complete:
        return found, None, tensors
    newest = Checkpoints(run / CHECKPOINTS).newest(skip)
    if newest is None and found is None:
        raise _nothing(run, damaged)
    if newest is None or (found is not None and newest[1].facts.get("steps", 0) <= (found.step or 0)):
        return found, None, tensors
    number, state = newest
    return (
        None,
        number,
        {name.removeprefix(MODEL): tensor for name, tensor in state.tensors.items() if name.startswith(MODEL)},
    )


def _nothing(run: Path, damaged: list[str]) -> LaunchError | LogError:
    if damaged:
        return LogError(f"all states in {run} are damaged: {'; '.join(damaged)}")
    problem, expected = f"{run} has no model", f"a finished run ({FINAL}), or one with a complete epoch or a checkpoint"
    return LaunchError(
        explain(problem, got=run, expected=expected, to_type="stretto run --checkpoint-every 5m SCRIPT, then export")
    )


def _write(out: Path, tensors: dict[str, Tensor]) -> None:
    import torch

    from stretto.checkpoint.storage import write_tensors

    with written_whole(out) as part:
        if out.suffix in TORCH_SUFFIXES:
            torch.save(tensors, part)
        else:
            write_tensors(part, tensors)
