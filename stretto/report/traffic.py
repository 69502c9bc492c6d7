"""Traffic of workers: raw and encoded bytes by purpose and direction, values sent, and norms of residuals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.events import Event
from stretto.report import formatting
from stretto.report.run_log import History, number

Account = dict[str, int]
"""Bytes of one purpose in each of DIRECTIONS."""
Accounts = dict[str, Account]
"""Accounts of one worker by purpose."""

DIRECTIONS = ("raw_sent", "sent", "raw_received", "received")
EVALUATION_SYNC = "evaluation_sync"
"""Purpose of the average that only evaluation needs: never encoded, and not part of a method's cost."""


def accounts(event: Event) -> Accounts:
    """Return the bytes until an event by purpose, without purposes that have no traffic."""
    rows = event.get("traffic")
    by_purpose = ((str(name), _account(row)) for name, row in rows.items()) if isinstance(rows, dict) else ()
    return {name: account for name, account in by_purpose if any(account.values())}


def _account(row: object) -> Account:
    values: Sequence[Any] = row if isinstance(row, list) and len(row) == len(DIRECTIONS) else [0] * len(DIRECTIONS)
    return {direction: int(number(value) or 0) for direction, value in zip(DIRECTIONS, values, strict=True)}


def norms(event: Event) -> tuple[float, float] | None:
    """Return the norm of the last input of the codec and that of its residual afterwards, or None without them."""
    input_norm, residual_norm = _two(event.get("residual_norms"))
    return None if input_norm is None or residual_norm is None else (input_norm, residual_norm)


def _two(row: object) -> tuple[float | None, float | None]:
    pair: Sequence[Any] = row if isinstance(row, list) and len(row) == 2 else (None, None)
    return number(pair[0]), number(pair[1])


def fields(history: History) -> dict[str, Any]:
    """Return the traffic fields of a run record: empty lists and None for a single process.

    A list has an entry for each of the `processes`: for each worker, or each of its ranks.

    - `traffic`: for each worker and purpose the bytes `raw_sent`, `sent`, `raw_received`, `received`: as unencoded
      values and as encoded, before the transport multiplies them or adds headers (`bytes_sent`, `bytes_received`)
    - `values_sent`: for each worker the number of values in its messages (`sent`) and the number of values that they
      were selected from (`of`); null if unknown
    - `residual_norms`: for each worker the norm of the last `input` of the codec and that of its `residual` afterwards;
      null for codecs without a residual
    - `compression`: raw over encoded bytes, `sent` and `received` by all workers without evaluation syncs; and raw over
      transport bytes including evaluation syncs: `wire_sent`, `wire_received`
    - `values_sent_share`: values sent over all values; `residual_share`: norm of all residuals over that of all inputs
    """
    counts = history.last_counts_by_process()
    by_worker: dict[str, Any] = {
        "traffic": _known([accounts(event) for event in counts]),
        "values_sent": _known([_values_sent(event) for event in counts]),
        "residual_norms": _known([_norms(event) for event in counts]),
    }
    sent, received = (
        [int(event.get(f"bytes_{direction}") or 0) for event in counts] for direction in ("sent", "received")
    )
    return by_worker | shares(**by_worker, bytes_sent=sent, bytes_received=received)


def shares(
    *,
    traffic: Sequence[Accounts],
    values_sent: Sequence[dict[str, int] | None],
    residual_norms: Sequence[dict[str, float] | None],
    bytes_sent: Sequence[int],
    bytes_received: Sequence[int],
) -> dict[str, Any]:
    """Return the ratios of a run record, computed from its fields of each worker."""
    transport = {"sent": sum(bytes_sent), "received": sum(bytes_received)}
    return {
        "compression": _compression(traffic, transport) if traffic else None,
        "values_sent_share": _share(values_sent),
        "residual_share": residual_share([(norms["input"], norms["residual"]) for norms in residual_norms if norms]),
    }


def nothing() -> dict[str, Any]:
    """Return the traffic fields of a run that left no log."""
    lists: dict[str, Any] = {name: [] for name in ("traffic", "values_sent", "residual_norms")}
    return lists | dict.fromkeys(("compression", "values_sent_share", "residual_share"))


def _known(by_worker: list[Any]) -> list[Any]:
    """Return the list, or an empty one when no worker has a value."""
    return by_worker if any(by_worker) else []


def _values_sent(event: Event) -> dict[str, int] | None:
    sent, total_values = _two(event.get("values_sent"))
    return None if sent is None or total_values is None else {"sent": int(sent), "of": int(total_values)}


def _norms(event: Event) -> dict[str, float] | None:
    pair = norms(event)
    return {"input": pair[0], "residual": pair[1]} if pair else None


def _share(values_sent: Sequence[dict[str, int] | None]) -> float | None:
    sent, total_values = (sum(counts[name] for counts in values_sent if counts) for name in ("sent", "of"))
    return sent / total_values if total_values else None


def residual_share(norms: Sequence[tuple[float, float]]) -> float | None:
    """Return the norm of the residuals of all workers over that of their inputs, given (input, residual) of each."""
    input_norm, residual_norm = (math.hypot(*(pair[index] for pair in norms)) for index in (0, 1))
    return residual_norm / input_norm if input_norm else None


def _compression(traffic: Sequence[Accounts], transport: Mapping[str, int]) -> dict[str, float | None]:
    ratios = {
        direction: ratio(total(traffic, f"raw_{direction}"), total(traffic, direction))
        for direction in ("sent", "received")
    }
    raw = {direction: total(traffic, f"raw_{direction}", evaluation=True) for direction in transport}
    return ratios | {f"wire_{direction}": ratio(raw[direction], transport[direction]) for direction in transport}


def ratio(raw: float, encoded: float) -> float | None:
    """Return the compression ratio, or None where nothing was sent."""
    return raw / encoded if encoded else None


def total(traffic: Sequence[Accounts], direction: str, *, evaluation: bool = False) -> int:
    """Return the bytes of all workers in one of DIRECTIONS, with evaluation syncs if `evaluation`."""
    accounts = (item for worker in traffic for item in worker.items())
    return sum(account[direction] for purpose, account in accounts if evaluation or purpose != EVALUATION_SYNC)


def megabytes(traffic: Sequence[Accounts], direction: str, workers: int) -> float | None:
    """Return the mean over workers in units of 10^6 bytes, without evaluation syncs."""
    return total(traffic, direction) / workers / 1e6 if traffic else None


def purposes(traffic: Sequence[Accounts]) -> list[str]:
    """Return all purposes that any worker has traffic for, the evaluation sync last."""
    names = dict.fromkeys(purpose for worker in traffic for purpose in worker)
    return sorted(names, key=lambda purpose: purpose == EVALUATION_SYNC)


def is_encoded(record: Mapping[str, Any]) -> bool:
    """Return True if a run sent encoded values."""
    traffic: Sequence[Accounts] = record.get("traffic") or []
    return any(total(traffic, f"raw_{direction}") != total(traffic, direction) for direction in ("sent", "received"))


def summary(record: Mapping[str, Any]) -> str:
    """Return the effect of an encoding in one line; empty for a run that encoded nothing."""
    if not is_encoded(record):
        return ""
    raw, sent, received = (
        formatting.figure(megabytes(record["traffic"], direction, record["workers"]))
        for direction in ("raw_sent", "sent", "received")
    )
    ratios = {direction: formatting.times(record["compression"][direction]) for direction in ("sent", "received")}
    texts = [
        f"encoded, per worker: {sent} MB of {raw} sent ({ratios['sent']} less), {received} received "
        f"({ratios['received']} less)"
    ]
    if record["values_sent_share"] not in (None, 1.0):
        texts.append(f"{formatting.percent(record['values_sent_share'])} of the values")
    if record["residual_share"] is not None:
        texts.append(f"residual {formatting.figure(record['residual_share'], 2)} of the input")
    return ", ".join(texts)
