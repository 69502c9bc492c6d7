"""Runs from a program or a notebook: `stretto.run` does what the command does, and returns the result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.call_syntax import nearest
from stretto.checkpoint.model_file import FINAL, ModelFile, newest
from stretto.errors import LaunchError, LogError, explain
from stretto.launcher.engines.functions import script_of
from stretto.launcher.local import run as run_locally
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig, decode_path
from stretto.run_config import options as run_options
from stretto.run_dir import section_folders

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OnCluster:
    """Cluster that starts the workers of a run: the text of `--on`, and what it reserves for each worker."""

    on: str
    resources: str | None = None


def ray(address: str | None = None, resources: str | None = None) -> OnCluster:
    """Return a Ray cluster: at an address `ray://HEAD:PORT`, that of `ray.init`, of RAY_ADDRESS, or on this machine.

    >>> ray(resources="1 GPU, 4 CPU").on
    'ray'
    """
    return OnCluster(address or "ray", resources)


def spark(session: object = None, address: str | None = None, resources: str | None = None) -> OnCluster:
    """Return a Spark: that of a SparkSession, at an address `spark://HEAD:PORT`, or as Spark's settings say.

    A process has one context of Spark, which all its sessions share. Raises LaunchError for a session without one.

    >>> spark(address="spark://head:7077").on
    'spark://head:7077'
    """
    if session is not None and not hasattr(session, "sparkContext"):
        problem, expected = "workers cannot run on this session of Spark", "a SparkSession of this process"
        got, to_type = f"{type(session).__name__} without a sparkContext", "SparkSession.builder.getOrCreate()"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    return OnCluster(address or "spark", resources)


@dataclass(frozen=True)
class RunResult:
    """Result of a run. That of a run that has failed is `RunResult(error.folder)`, given the RunFailedError."""

    folder: Path
    """Run directory."""

    @property
    def report(self) -> Path:
        """Page of the run."""
        return self.folder / "report.html"

    @property
    def record(self) -> dict[str, Any]:
        """Numbers of the run, as `--json` writes them."""
        from stretto.report.run_record import record  # only here: a caller may not need it

        return record(self.folder)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, in the last section that has one; empty without `evaluate=`."""
        folders = (*reversed(section_folders(self.folder)), self.folder)
        found = (RunResult(folder).record["metrics"] for folder in folders)
        return dict(next((metrics for metrics in found if metrics), {}))

    @property
    def model(self) -> ModelFile | None:
        """File of the trained model; of a run that failed, the last model on which the workers agreed, if any.

        Of a script that has trained several, that of the last one. `is_complete` is False for the model of a run that
        failed, whose `epoch`, `step` and `cause` it has.
        """
        return newest(self.folder)

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the trained model, for `model.load_state_dict`. Raises LogError without one."""
        from safetensors.torch import load_file

        model = self.model
        if model is None or not model.is_complete:
            raise LogError(f"{self.folder} has no {FINAL}: the script has not distributed a model, or has not ended")
        return load_file(model.path)


def run(
    program: str | Path | Callable[..., object],
    *args: object,
    workers: int = 1,
    on: OnCluster | str | None = None,
    elastic: tuple[int, int] | None = None,
    quiet: bool = False,
    **options: Any,
) -> RunResult:
    """Run a script or a function with these arguments on workers, and return the result.

    `elastic` are the smallest and the largest number of workers. `options` are those of `stretto run`, under the names
    of their fields: `recipe="local_sgd(every=16)"`, `host="10.0.0.1:7878"`, `out="runs/first"`. Raises LaunchError as
    the command prints it. A function is sent with the values that it refers to; modules that it imports must be where
    the workers run. What it returns is not sent back: `stretto.log` and `evaluate=` record numbers.

    Example:
        >>> def train(lr):
        ...     import torch, stretto
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr)
        ...     data = torch.utils.data.TensorDataset(torch.ones(8, 2))
        ...     loader = torch.utils.data.DataLoader(data, batch_size=2)
        ...     norm = lambda model: {"norm": model.weight.norm().item()}
        ...     for (x,) in stretto.distribute(model, optimizer, loader, evaluate=norm):
        ...         model(x).mean().backward()
        ...         optimizer.step()
        >>> result = stretto.run(train, 0.1, workers=2, quiet=True)  # doctest: +SKIP
        >>> result.metrics  # doctest: +SKIP
        {'norm': 0.97}
    """
    cluster = OnCluster(on) if isinstance(on, str) else on
    values = {**options, "workers": workers}
    if cluster is not None:
        values |= {"on": cluster.on, "resources": cluster.resources}
    if elastic is not None:
        values |= {"min_workers": elastic[0], "max_workers": elastic[1]}
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        if callable(program):
            script, args = script_of(program, args, cluster.on if cluster is not None else None, Path(folder)), ()
        else:
            script = Path(program)
        found = run_locally(
            _config({**values, "script": script, "args": [*map(str, args)]}), ProgressDisplay(quiet=quiet)
        )
    from stretto.report.summary import conclude  # only here: matplotlib is slow to import

    conclude(found, None, silent=quiet)
    return RunResult(found)


def _config(values: dict[str, Any]) -> RunConfig:
    """Return the configuration of these values. Raises LaunchError for a name or a value that is none."""
    if unknown := next((name for name in values.keys() - {"script", "args"} if name not in run_options()), None):
        near = nearest(unknown, run_options())
        problem, expected = f"stretto.run has no option {unknown}", "a field of an option of `stretto run`"
        raise LaunchError(explain(problem, got=unknown, expected=expected, to_type=f"{near or 'recipe'}=..."))
    try:
        return msgspec.convert(msgspec.to_builtins(values, enc_hook=str), RunConfig, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        problem, expected = f"an option of stretto.run cannot be read: {error}", "a value of its type"
        raise LaunchError(explain(problem, got=error, expected=expected, to_type="stretto run --help")) from error
