"""Tables of docs/figures.md about models that several processes hold together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables_of_hosts import head, ratio

Record = Mapping[str, Any]


def pipeline(record: Record) -> Iterator[str]:
    """Yield the time of a step of a pipeline beside those of torch's schedules."""
    yield from head("A pipeline of 2 stages on one host: a plain loop against schedules of torch", "pipeline")
    yield "| side | ms a step | Stretto's speed, times this one's | wanted |"
    yield "| --- | --- | --- | --- |"
    for side, taken in record["sides"].items():
        one = record["ratios"].get(side)
        against = f"{ratio(one['ratio'])} | at least {one['wanted']:.2f}" if one else " | "
        yield f"| {side} | {1e3 * statistics.median(taken['seconds_a_step']):.1f} | {against} |"
    shown = ", ".join(f"{one:.2f}" for one in record["predictions"])
    yield ""
    yield f"A pass as predicted from a measured split, as a multiple of the measured one: {shown} in each start; wanted"
    yield f"within {record['wanted_prediction']:.0%}."


def hybrid(record: Record) -> Iterator[str]:
    """Yield the time of a step of a hybrid beside that of FSDP."""
    yield from head(
        "4 hosts at 100 Mbit/s: a pipeline in each host with DiLoCo between, against FSDP over all", "hybrid"
    )
    yield "| side | s a step, of each start | steps a second, times those of FSDP | wanted |"
    yield "| --- | --- | --- | --- |"
    for number, (side, seconds) in enumerate(record["seconds_a_step"].items()):
        against = " | " if number else f"{ratio(record['ratio'])} | at least {record['wanted']:g}"
        yield f"| {side} | {', '.join(f'{one:.3f}' for one in seconds)} | {against} |"


def factorise(record: Record) -> Iterator[str]:
    """Yield the speed of a factorisation beside LIBMF, that of two processes, and the errors on real ratings."""
    yield from head("Factorisation in blocks, rank 32, 3.6 million values", "factorise")
    yield "| figure | median | wanted |"
    yield "| --- | --- | --- |"
    for side, rates in record["rates"].items():
        wanted = "" if side == "LIBMF" else f"at least {record['wanted_rate'] / 1e6:g}"
        yield f"| {side}: M values a second of one core | {statistics.median(rates) / 1e6:.1f} | {wanted} |"
    yield f"| 2 processes: times the speed of one | {ratio(record['ratio'])} | at least {record['wanted']:g} |"
    for processes, errors in record["errors"].items():
        worst = f"{statistics.median(errors):.4f}, worst {max(errors):.4f}"
        yield f"| error on MovieLens, {processes} processes | {worst} | at most {record['wanted_error']:g} |"
