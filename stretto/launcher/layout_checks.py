"""Checks of a run's layout against its other options, before any process starts."""

from __future__ import annotations

from collections.abc import Callable

from stretto.errors import LaunchError, explain
from stretto.host_list import parse as parse_hosts
from stretto.run_config import RunConfig


def check_layout(config: RunConfig, ranks: int, waits_at_servers: Callable[[], bool]) -> None:
    """Raise LaunchError for a layout that these processes, or this recipe, can't have."""
    if config.layout is None or config.ranks > 1:
        return
    from stretto.recipe.layout import as_option
    from stretto.recipe.parser import parse_layout

    chosen, layout = parse_layout(config.layout), as_option(config.layout)
    if not chosen.takes_recipe:
        _refuse_for_blocks(config, layout)
    if ranks == 1:
        return
    if config.workers % ranks or (not config.workers and config.host is None):
        raise indivisible(config.workers, ranks, f"-n {{}} {layout}")
    for host in parse_hosts(config.hosts or ""):
        if host.workers % ranks:
            raise indivisible(host.workers, ranks, f"--hosts {host.name}:{{}} {layout}")
    if not config.recovery:
        problem, got = "workers of several processes cannot run with --no-recovery yet", f"--no-recovery {layout}"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=layout))
    if waits_at_servers():
        problem = "workers of several processes that wait for each other exchange without a parameter server"
        got = f"--recipe {config.recipe}{f' --servers {config.servers}' if config.servers else ''} {layout}"
        expected = "a recipe whose workers exchange with each other, or do not wait for each other"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=f"--recipe local_sgd {layout}"))


def indivisible(processes: int, ranks: int, words: str) -> LaunchError:
    """Return the error for a number of processes, to be typed in these words, that cannot be divided into workers."""
    problem = f"{processes} processes cannot be divided into workers of {ranks}"
    expected, enough = f"a multiple of {ranks} processes", max(1, -(-processes // ranks)) * ranks
    return LaunchError(explain(problem, got=words.format(processes), expected=expected, to_type=words.format(enough)))


def _refuse_for_blocks(config: RunConfig, layout: str) -> None:
    """Raise LaunchError for options that mean nothing to ranks which exchange blocks, or that they can't follow."""
    if config.workers < 2:
        problem, got = "column blocks rotate among several processes", f"-n {config.workers} {layout}"
        expected = "at least 2 processes, or one without a layout"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=f"-n 2 {layout}"))
    if config.recipe is not None:
        problem, got = "the processes exchange column blocks, and no recipe says what else", f"--recipe {config.recipe}"
        raise LaunchError(explain(problem, got=got, expected="no recipe", to_type=layout))
    if config.host is not None:
        problem = "the processes hold their blocks from the start, so that no others can join"
        got = f"--listen {config.host} {layout}"
        raise LaunchError(explain(problem, got=got, expected="one of the two", to_type=layout))
    if config.stop_within_s:
        problem, got = "the processes are at different batches when they are asked to stop", "--stop-within"
        raise LaunchError(explain(problem, got=f"{got} {layout}", expected="one of the two", to_type=layout))
    if (due := config.checkpoints) is not None and due.rounds is None and not due.follows_cost:
        problem, got = (
            "the processes save when column blocks have rotated, not by the clock",
            f"--checkpoint-every {config.checkpoint_every}",
        )
        expected, to_type = "a number of rotations", f'--checkpoint-every "4 rounds" {layout}'
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
