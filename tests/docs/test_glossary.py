"""The glossary has a line and a source for every term that the project uses."""

from __future__ import annotations

import re

from documents import ROOT

TERMS = """
worker, rank, replica, host, launcher, supervisor, coordinator, membership, generation, incarnation, heartbeat,
failure detector, failure timeout, rendezvous, transport, channel, request handler, parameter server, shard,
version, staleness, staleness bound, push, pull, snapshot, rollback, checkpoint, resume, write-ahead log,
dispatcher, lease, epoch, step, global step, global batch, micro-batch, batch assignment, sampler, local steps,
barrier, soft synchronisation, all-reduce, all-gather, broadcast, root, gossip, neighbour, mixing matrix, topology,
process group, device mesh, codec, residual, sparsifier, quantizer, payload, traffic, evaluation, baseline,
straggler, fault, fault injection, virtual time, event queue, run directory, event log, run record
""".replace("\n", " ")
ROW = re.compile(r"^\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \| (?P<source>[^|]*) \|$", re.M)


def test_every_term_has_one_line_with_a_source() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = [row for row in ROW.finditer(text) if row["term"] not in ("term", "---")]
    defined = [term.strip() for row in rows for term in re.sub(r"\(.*?\)", "", row["term"]).split(",")]
    assert sorted(set(defined)) == sorted(defined)
    assert not [term for term in map(str.strip, TERMS.split(",")) if term not in defined]
    assert not [row["term"] for row in rows if not row["source"].strip()]
