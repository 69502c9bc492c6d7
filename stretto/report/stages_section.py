"""Section of a page on workers of several ranks: passes of the stages of a pipeline, and memory of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stretto.report import formatting, run_log, stages
from stretto.report.aggregation import Group, grouped
from stretto.report.run_log import History
from stretto.report.run_record import Record
from stretto.report.tables import Cell, Sheet, spread_cell

STAGES, MEMORY = "Stages", "Memory of the ranks"
MOST_RANKS = 16
STAGES_NOTE = (
    "A pass is the forward and the backward pass of a batch; times of one, mean over the run. A stage waits for the "
    "others while the pipeline fills and empties (the bubble), for slower stages, and for links."
)
MEMORY_NOTE = (
    "MB. Gradients: of all trained parameters. Activations: what the modules keep for the backward pass, measured with "
    "the first batch. Peak: of the process, with all else that is in it."
)
PREDICTED_NOTE = (
    "Simulated: a pass is the forward and the backward pass of a batch, with the activations on the links. A stage "
    "waits while the pipeline fills and empties (the bubble), for slower stages, and for links."
)
COMPARED_NOTE = "A pass is the forward and the backward pass of a batch. Waiting: share of it, mean over the stages."
HELD = ("parameters", "gradients", "state", "peak")


def sheets(history: History) -> list[Sheet]:
    """Return the tables of a run whose workers have several ranks; nothing for others."""
    found = stages.ranks(history)
    if not found:
        return _predicted(history)
    shown = found[:MOST_RANKS]
    omitted = f" The first {len(shown)} of {len(found)} ranks." if len(shown) < len(found) else ""
    has_stages = any(one.pass_s is not None for one in shown)
    return [*([_stages(history, shown, omitted)] if has_stages else []), *_memory(history, shown, omitted)]


def _predicted(history: History) -> list[Sheet]:
    """Return the table of a simulated pipeline, whose passes are predicted; nothing without one."""
    event = stages.prediction(history) or {}
    pass_s, computing = run_log.number(event.get("predicted_s")), event.get("computing") or []
    if not pass_s:
        return []
    rows = []
    for rank, module in enumerate((event.get("modules") or [])[:MOST_RANKS]):
        busy_s = run_log.number(computing[rank]) if rank < len(computing) else None
        idle_s = None if busy_s is None else pass_s - busy_s
        share = formatting.percent(None if idle_s is None else idle_s / pass_s)
        texts = (str(rank), str(module), _milliseconds(busy_s), _milliseconds(idle_s), share)
        rows.append(tuple(map(Cell, texts)))
    balance = formatting.figure(run_log.number(event.get("balance")), 2)
    note = f"{PREDICTED_NOTE} A pass takes {_milliseconds(pass_s)}; balance {balance}."
    return [Sheet(STAGES, note, ("stage", "begins with", "computing", "waiting", "share"), tuple(rows))]


def _stages(history: History, shown: Sequence[stages.Rank], omitted: str) -> Sheet:
    modules = (stages.prediction(history) or {}).get("modules") or []
    columns = ("rank", "begins with", "pass", "computing", "predicted", "waiting", "share")
    rows = tuple(_stage(history, one, modules) for one in shown)
    return Sheet(STAGES, f"{_sentence(history)} {STAGES_NOTE}{omitted}", columns, rows)


def _stage(history: History, one: stages.Rank, modules: Sequence[Any]) -> tuple[Cell, ...]:
    share = None if one.waiting_s is None or not one.pass_s else one.waiting_s / one.pass_s
    module = str(modules[one.rank]) if one.rank < len(modules) else formatting.NOTHING
    times = (one.pass_s, one.computing_s, stages.predicted_computing(history, one.rank), one.waiting_s)
    return (
        Cell(one.name),
        Cell(module),
        *(Cell(_milliseconds(value)) for value in times),
        Cell(formatting.percent(share)),
    )


def _sentence(history: History) -> str:
    """Return the passes in words, measured beside predicted."""
    found, ratio = stages.summary(history) or {}, partial(formatting.figure, digits=2)
    pass_text = _beside(found["pass_s"], found["predicted_s"], _milliseconds)
    waiting = _beside(found["waiting"], found["predicted_waiting"], formatting.percent)
    balance = _beside(found["balance"], found["predicted_balance"], ratio)
    return f"A pass took {pass_text}; stages waited {waiting} of it; balance {balance}."


def _beside(value: float | None, predicted: float | None, write: Callable[[float | None], str]) -> str:
    return write(value) + (f" (predicted {write(predicted)})" if predicted is not None else "")


def _milliseconds(value: float | None) -> str:
    return formatting.NOTHING if value is None else f"{formatting.figure(1e3 * value)} ms"


def _memory(history: History, shown: Sequence[stages.Rank], omitted: str) -> list[Sheet]:
    if not shown:
        return []
    columns = ("rank", "parameters", "gradients", "optimizer state", "activations", "peak")
    return [Sheet(MEMORY, MEMORY_NOTE + omitted, columns, tuple(_held(history, one) for one in shown))]


def _held(history: History, one: stages.Rank) -> tuple[Cell, ...]:
    *held, peak = (one.memory.get(name) for name in HELD)
    values = (*held, stages.activations(history, one.rank), peak)
    return (Cell(one.name), *(Cell(_megabytes(value)) for value in values))


def _megabytes(value: float | None) -> str:
    return formatting.figure(None if value is None else value / 1e6)


def of_recipes(records: Sequence[Record]) -> list[Sheet]:
    """Return the table of a comparison: measured passes beside predicted ones; nothing without stages."""
    found = [group for group in grouped(records) if any(record.get("stages") for record in group.records)]
    if not found:
        return []
    columns = ("run", "workers", "pass", "predicted pass", "waiting", "predicted waiting", "balance")
    return [Sheet(STAGES, COMPARED_NOTE, columns, tuple(map(_compared, found)))]


def _compared(group: Group) -> tuple[Cell, ...]:
    def cell(name: str, write: Callable[[float | None], str]) -> Cell:
        return spread_cell(group.spread(lambda record: (record.get("stages") or {}).get(name)), write)

    two_digits = partial(formatting.figure, digits=2)
    return (
        Cell(group.label),
        Cell(str(group.workers)),
        cell("pass_s", _milliseconds),
        cell("predicted_s", _milliseconds),
        cell("waiting", formatting.percent),
        cell("predicted_waiting", formatting.percent),
        cell("balance", two_digits),
    )
