"""What to run: an order, and everything that can be wrong with it before a process is started."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stretto.errors import LaunchError, explain
from stretto.folder import cores
from stretto.launch.slow import factors

Output = Literal["lead", "all", "none"]
OnNan = Literal["stop", "skip"]
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Order:
    """One run of a script on workers of this machine.

    `recipe` is text and wins over the script's; `alone` switches every exchange off and `join` makes one
    batch of so many of the script's. `threads` is per worker, `timeout_s` limits every wait on another
    worker, and `output` says whose lines reach the terminal. The log of each worker holds all of them.

    `servers` puts the recipe over a parameter server of so many shards, `on_nan` says what those do with an
    update that is not finite, and `plain` leaves their traffic unencrypted. `slow` stretches the computing of
    some workers: `1:2.0,3:5.0`.
    """

    script: Path
    args: tuple[str, ...] = ()
    workers: int = 1
    recipe: str | None = None
    seed: int = 0
    alone: bool = False
    join: int = 1
    out: Path | None = None
    threads: int | None = None
    port: int | None = None
    timeout_s: float = 600.0
    keep_states: bool = False
    output: Output = "lead"
    servers: int | None = None
    slow: str | None = None
    on_nan: OnNan = "stop"
    plain: bool = False

    def threads_each(self) -> int:
        """Threads of each worker: as asked, else the cores shared out, at least one."""
        return self.threads or max(1, cores() // self.workers)

    def asked(self) -> dict[str, Any]:
        """What `run.json` says was asked for."""
        return {
            "script": str(self.script),
            "args": list(self.args),
            "recipe": self.recipe,
            "workers": self.workers,
            "seed": self.seed,
            "alone": self.alone,
            "join": self.join,
            "threads": self.threads_each(),
            "servers": self.servers or 0,
            "slow": self.slow,
        }


def settled(order: Order) -> Order:
    """The same order with all that follows from it: the recipe over its servers, and how many those are."""
    if order.recipe is None:
        return replace(order, servers=0)
    from stretto.typed import parse, with_shards

    recipe = with_shards(order.recipe, order.servers) if order.servers else order.recipe
    shards = parse(recipe).shards
    return replace(order, recipe=recipe, servers=0 if order.alone else shards)


def check(order: Order) -> None:
    """Raise LaunchError or RecipeError when the order cannot be run as it is; nothing is started then."""
    _check_script(order.script)
    _check_numbers(order)
    if order.alone and order.workers != 1:
        raise LaunchError(explain("alone means one worker", got=order.workers, expected="1 worker", to_type="-n 1"))
    if order.servers and order.recipe is None:
        raise _without_recipe(order.servers)
    factors(order.slow, order.workers)
    _check_server_options(order)


def _check_server_options(order: Order) -> None:
    """Refuse what would change nothing without a server."""
    from stretto.typed import parse

    recipe = settled(order).recipe
    asked = parse(recipe) if recipe is not None else None
    got = f"--recipe {recipe}" if recipe is not None else "no --recipe"
    if order.on_nan == "skip" and not (asked and asked.asynchronous):
        problem, expected = "only what arrives at a server can be left out", "a recipe on arrival, as async_sgd"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--recipe async_sgd --on-nan skip"))
    if order.plain and not (asked and asked.shards):
        problem, expected = "there is no server to speak plainly to", "a recipe with a server, as async_sgd"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--recipe async_sgd --plain"))


def _check_numbers(order: Order) -> None:
    _at_least_one("the number of workers", order.workers, "-n 4")
    _at_least_one("the number of threads per worker", order.threads, "--threads 1")
    _at_least_one("the number of joined batches", order.join, "join=4")
    _at_least_one("the number of servers", order.servers, "--servers 2")
    if not 0 <= order.seed <= LARGEST_SEED:
        _refuse("the seed", order.seed, f"a whole number from 0 to {LARGEST_SEED}", "--seed 1")
    if not (order.timeout_s > 0 and math.isfinite(order.timeout_s)):
        _refuse("the limit of a wait", order.timeout_s, "seconds, more than 0", "--timeout 600")
    if order.port is not None and not 0 <= order.port <= 65535:
        _refuse("the port", order.port, "a port from 1 to 65535, or 0 for a free one", "leave --port away")


def _at_least_one(what: str, got: int | None, to_type: str) -> None:
    if got is not None and got < 1:
        _refuse(what, got, "a whole number, at least 1", to_type)


def _refuse(what: str, got: object, expected: str, to_type: str) -> None:
    raise LaunchError(explain(f"{what} cannot be {got}", got=got, expected=expected, to_type=to_type))


def _without_recipe(servers: int) -> LaunchError:
    got, expected = f"--servers {servers} alone", "a recipe to put over a parameter server"
    to_type = f"--recipe async_sgd --servers {servers}"
    return LaunchError(explain("--servers needs --recipe", got=got, expected=expected, to_type=to_type))


def _check_script(script: Path) -> None:
    if script.is_file():
        return
    problem = f"the script {script} is a folder" if script.is_dir() else f"there is no script {script}"
    near = _near(script)
    to_type = f"stretto run {near[0]}" if near else "stretto run path/to/train.py"
    expected = "a Python file" + (f"; near it are {', '.join(near)}" if near else "")
    raise LaunchError(explain(problem, got=script, expected=expected, to_type=to_type))


def _near(script: Path) -> list[str]:
    """Python files with a name like a missing script's: beside it, here, or in the examples."""
    folders = dict.fromkeys((script if script.is_dir() else script.parent, Path(), Path("examples")))
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    names = difflib.get_close_matches(script.stem, [file.stem for file in files], n=3, cutoff=0.5)
    return [str(file) for name in dict.fromkeys(names) for file in files if file.stem == name][:3]
