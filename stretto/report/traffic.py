"""What workers exchanged: bytes raw and encoded, by purpose and direction; entries sent; what is owed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.events import Event
from stretto.report import formatting
from stretto.report.run_log import History, number

Account = dict[str, int]
"""Bytes of one purpose in each of WAYS."""
Accounts = dict[str, Account]
"""The accounts of one worker, by purpose."""

WAYS = ("raw_sent", "sent", "raw_received", "received")
LOOKS = "evaluation_sync"
"""The purpose of what is exchanged only to evaluate the agreed model: never encoded, and no part of a method's cost."""


def accounts(event: Event) -> Accounts:
    """By purpose, the bytes until an event; purposes that nothing was said for are left out."""
    found = event.get("traffic")
    named = ((str(name), _account(row)) for name, row in found.items()) if isinstance(found, dict) else ()
    return {name: account for name, account in named if any(account.values())}


def _account(row: object) -> Account:
    values: Sequence[Any] = row if isinstance(row, list) and len(row) == len(WAYS) else [0] * len(WAYS)
    return {way: int(number(value) or 0) for way, value in zip(WAYS, values, strict=True)}


def measured(event: Event) -> tuple[float, float] | None:
    """The norms of what was last given to the codec and of what it owed then."""
    given, owed = _two(event.get("residual_norms"))
    return None if given is None or owed is None else (given, owed)


def _two(row: object) -> tuple[float | None, float | None]:
    found: Sequence[Any] = row if isinstance(row, list) and len(row) == 2 else (None, None)
    return number(found[0]), number(found[1])


def fields(history: History) -> dict[str, Any]:
    """What a record says of exchanges. A run alone, or one of an earlier version, has empty lists and None.

    - `exchanged`: for each worker, purpose by purpose, bytes `raw_sent`, `sent`, `raw_received`, `received`: as exact
      numbers and as encoded, before the wire multiplies them or adds its heads (`bytes_sent`, `bytes_received`)
    - `entries`: for each worker how many numbers its messages told (`sent`), `of` how many; null where that is unknown
    - `norms`: for each worker that of what was last `given` to the codec, and of what was `owed` then; null without
    - `compression`: raw over encoded bytes, `sent` and `received` by all workers, looks left out; and raw over the
      bytes of the wire, looks included: `wire_sent`, `wire_received`
    - `values_sent_share`: entries sent over all entries; `residual_share`: norm of all residuals
      over that of all inputs
    """
    counts = history.last_counts()
    kept: dict[str, Any] = {
        "traffic": _known([accounts(event) for event in counts]),
        "values_sent": _known([_entries(event) for event in counts]),
        "residual_norms": _known([_norms(event) for event in counts]),
    }
    sent, received = ([int(event.get(f"bytes_{way}") or 0) for event in counts] for way in ("sent", "received"))
    return kept | shares(**kept, bytes_sent=sent, bytes_received=received)


def shares(
    *,
    traffic: Sequence[Accounts],
    values_sent: Sequence[dict[str, int] | None],
    residual_norms: Sequence[dict[str, float] | None],
    bytes_sent: Sequence[int],
    bytes_received: Sequence[int],
) -> dict[str, Any]:
    """The three ratios of a record, from what it says of each worker."""
    wire = {"sent": sum(bytes_sent), "received": sum(bytes_received)}
    return {
        "compression": _compression(traffic, wire) if traffic else None,
        "values_sent_share": _share(values_sent),
        "residual_share": residual_share([(one["input"], one["residual"]) for one in residual_norms if one]),
    }


def nothing() -> dict[str, Any]:
    """The same of a run that left nothing to read."""
    lists: dict[str, Any] = {name: [] for name in ("traffic", "values_sent", "residual_norms")}
    return lists | dict.fromkeys(("compression", "values_sent_share", "residual_share"))


def _known(by_worker: list[Any]) -> list[Any]:
    """Empty when no worker said anything."""
    return by_worker if any(by_worker) else []


def _entries(event: Event) -> dict[str, int] | None:
    sent, of = _two(event.get("values_sent"))
    return None if sent is None or of is None else {"sent": int(sent), "of": int(of)}


def _norms(event: Event) -> dict[str, float] | None:
    found = measured(event)
    return {"input": found[0], "residual": found[1]} if found else None


def _share(entries: Sequence[dict[str, int] | None]) -> float | None:
    sent, of = (sum(one[part] for one in entries if one) for part in ("sent", "of"))
    return sent / of if of else None


def residual_share(both: Sequence[tuple[float, float]]) -> float | None:
    """The norm of what all workers owe over the norm of what all were given, from both norms of each."""
    given, owed = (math.hypot(*(one[part] for one in both)) for part in (0, 1))
    return owed / given if given else None


def _compression(exchanged: Sequence[Accounts], wire: Mapping[str, int]) -> dict[str, float | None]:
    ratios = {way: fewer(total(exchanged, f"raw_{way}"), total(exchanged, way)) for way in ("sent", "received")}
    on_wire = {f"wire_{way}": fewer(total(exchanged, f"raw_{way}", looks=True), wire[way]) for way in wire}
    return ratios | on_wire


def fewer(raw: float, said: float) -> float | None:
    """How many times fewer the bytes became."""
    return raw / said if said else None


def total(exchanged: Sequence[Accounts], way: str, *, looks: bool = False) -> int:
    """The bytes of all workers in one way, over all purposes; looks only if they are asked for."""
    return sum(one[way] for worker in exchanged for purpose, one in worker.items() if looks or purpose != LOOKS)


def megabytes(exchanged: Sequence[Accounts], way: str) -> float | None:
    """The mean over workers in units of 10^6 bytes, looks left out."""
    return total(exchanged, way) / len(exchanged) / 1e6 if exchanged else None


def purposes(exchanged: Sequence[Accounts]) -> list[str]:
    """All purposes that any worker exchanged for, looks last."""
    found = dict.fromkeys(purpose for worker in exchanged for purpose in worker)
    return sorted(found, key=lambda purpose: purpose == LOOKS)


def is_encoded(record: Mapping[str, Any]) -> bool:
    """Whether a run exchanged other bytes than its exact numbers."""
    exchanged: Sequence[Accounts] = record.get("traffic") or []
    return any(total(exchanged, f"raw_{way}") != total(exchanged, way) for way in ("sent", "received"))


def in_words(record: Mapping[str, Any]) -> str:
    """What an encoding saved, in one line; empty for a run that exchanged exact numbers, or none."""
    if not is_encoded(record):
        return ""
    exchanged = record["traffic"]
    raw, sent, received = (formatting.figure(megabytes(exchanged, way)) for way in ("raw_sent", "sent", "received"))
    ratios = {way: formatting.times(record["compression"][way]) for way in ("sent", "received")}
    texts = [f"encoded: {sent} MB of {raw} sent ({ratios['sent']} fewer), {received} received ({ratios['received']})"]
    if record["values_sent_share"] is not None:
        texts.append(f"{formatting.percent(record['values_sent_share'])} of entries")
    if record["residual_share"] is not None:
        texts.append(f"owed {formatting.figure(record['residual_share'], 2)} of what was given")
    return ", ".join(texts)
