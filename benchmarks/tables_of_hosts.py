"""Tables of docs/figures.md about exchanges on one host and between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]


def head(about: str, command: str) -> Iterator[str]:
    """Yield a heading and the command that takes the figures."""
    yield ""
    yield f"## {about}"
    yield ""
    yield f"`python -m benchmarks {command}`"
    yield ""


def ratio(one: Record) -> str:
    """Return a ratio with its standard error, if it has one."""
    error = one["standard_error"]
    return f"{one['median']:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def costs(one: Record) -> str:
    """Return the columns of a spread of seconds: median, quartiles, worst, and how many there are."""
    spread = one["s"]
    quartiles = f"{spread['quartile_1']:.3f} to {spread['quartile_3']:.3f}"
    return f"{spread['median']:.3f} | {quartiles} | {one['worst']:.3f} | {one['deaths']}"


def outcomes(record: Record, command: str) -> Iterator[str]:
    """Yield a row for each figure in seconds, with its goal."""
    yield from head(record["question"][0].upper() + record["question"][1:], command)
    yield "| event | median s | quartiles | worst | times | wanted |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, one in record["figures"].items():
        wanted = f"at most {one['wanted_s']:g}" if one["wanted_s"] else ""
        yield f"| {name} | {costs(one)} | {wanted} |"
    yield ""


def shared_memory(record: Record) -> Iterator[str]:
    """Yield the time of a mean in shared memory beside that over gloo."""
    yield from head("Means of workers on one host: shared memory against gloo over the loopback", "shared_memory")
    yield f"| numbers | workers | {' | '.join(f'{side}: ms' for side in record['sides'])} | times the rate | wanted |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for case in record["cases"].values():
        times = " | ".join(f"{case['ms'][side]['median']:.3f}" for side in record["sides"])
        wanted = f"at least {case['wanted']:g}"
        yield f"| {case['numbers']:,} | {case['workers']} | {times} | {ratio(case['ratio'])} | {wanted} |"


def hosts(record: Record) -> Iterator[str]:
    """Yield bytes and time of a mean of two hosts: the workers of a host as one, and a ring of all."""
    yield from head("A mean of 2 hosts of 2 workers: the workers of a host as one against a ring of all", "hosts")
    sides = list(record["cases"][0]["sides"])
    columns = " | ".join(f"{side}: MB on a host's link | ms" for side in sides)
    yield f"| numbers | Mbit/s | hosts of the ranks | {columns} | times fewer bytes |"
    yield "| --- " * (4 + 2 * len(sides)) + "|"
    for case in record["cases"]:
        figures = " | ".join(
            f"{case['sides'][side]['bytes_on_link'] / 1e6:.3f} | {case['sides'][side]['ms']['median']:.1f}"
            for side in sides
        )
        place = f"{case['numbers']:,} | {case['mbit']:g} | {case['hosts']}"
        yield f"| {place} | {figures} | {case['times_fewer_bytes']:.2f} |"


def encryption(record: Record) -> Iterator[str]:
    """Yield the time of an encrypted mean beside that over gloo."""
    yield from head("Means between hosts: encrypted against gloo, which is not", "encryption")
    yield "| numbers | workers | link | encrypted: ms | gloo: ms | times the rate | wanted |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for case in record["cases"]:
        times = " | ".join(f"{case['ms'][side]['median']:.2f}" for side in ("encrypted", "gloo"))
        link = f"{case['mbit']:g} Mbit/s" if case["mbit"] else "loopback"
        wanted = f"at least {case['wanted']:g}"
        yield f"| {case['numbers']:,} | {case['workers']} | {link} | {times} | {ratio(case['ratio'])} | {wanted} |"


def machines(record: Record) -> Iterator[str]:
    """Yield time per step, pauses and bytes of a join on four hosts, encrypted and over gloo."""
    yield from head("Four hosts, joined by `stretto join`: encrypted beside gloo", "machines")
    yield f"| link | side | ms a step | seconds to {record['target']:.0%} | times gloo's steps per second |"
    yield "| --- | --- | --- | --- | --- |"
    for case in record["training"]:
        for side, one in case["sides"].items():
            compared = f"{case['ratio']:.3f}" if side == "encrypted" else ""
            times = f"{one['ms_a_step']:.1f} | {one['seconds_to_target']:.1f}"
            yield f"| {case['mbit']:g} Mbit/s | {side} | {times} | {compared} |"
    yield ""
    yield f"| fault (failure timeout {record['failure_timeout_s']:g} s) | encrypted: s | gloo: s |"
    yield "| --- | --- | --- |"
    for case in record["pauses"]:
        times = " | ".join(f"{case['seconds'][side]['median']:.3f}" for side in ("encrypted", "gloo"))
        yield f"| {case['fault']} | {times} |"
    join = {name: f"{value / 1e6:.2f} MB" for name, value in record["join"].items()}
    yield ""
    yield f"A join: {join['received']} received and {join['sent']} sent up to the first step; parameters and momentum"
    yield f"have {join['state']}."


def floods(record: Record) -> Iterator[str]:
    """Yield steps per second and memory during floods, beside quiet ones."""
    yield from head(f"Floods of {record['seconds']:g} s by a stranger, each in a run of its own", "floods")
    yield "| recipe | flood | steps/s before, during, after | times the quiet | wanted | memory: MB before, during |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in record["cases"]:
        rates = ", ".join(f"{rate:.1f}" for rate in one["steps_per_s"].values())
        memory = ", ".join(f"{value:.0f}" for value in one["memory_mb"].values())
        wanted = f"at least {record['wanted']:g}"
        yield f"| {one['recipe']} | {one['flood']} | {rates} | {one['ratio']:.2f} | {wanted} | {memory} |"


def on_spark(record: Record) -> Iterator[str]:
    """Yield what a run on Spark takes for a lost task, its start and a round."""
    yield from outcomes(record, "spark")
    yield f"{_cores_shared_with('Spark', record)} A killed task leaves 2 of 3 workers. A round has a training step,"
    yield "except with Spark's reduce."


def on_ray(record: Record) -> Iterator[str]:
    """Yield what a run on Ray takes for a lost actor, a new node and its start."""
    yield from outcomes(record, "ray")
    yield f"{_cores_shared_with('Ray', record)} TorchTrainer restarts all workers from the beginning: its script"
    yield "writes and reads no checkpoint."


def _cores_shared_with(cluster: str, record: Record) -> str:
    workers, cores = record["workers"], record["machine"]["cores"]
    processes = "the imports of its processes, of the agents and of the workers take turns."
    return f"{workers} workers share {cores} cores with {cluster}, so {processes}"
