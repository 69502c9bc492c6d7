"""Two hosts of two workers in a laboratory: the workers of a host use its link as one."""

import pytest

from benchmarks.hosts import AS_ONE, PLACEMENTS, RING, Case, measure
from benchmarks.laboratory import Laboratory
from tests.benchmarks.test_laboratory import reason_for_skipping

CASE = Case(numbers=500_000, mbit=1000.0, means=10)
BYTES = 4 * CASE.numbers
HEADERS = 1.12
"""Upper bound of bytes on a link divided by those of the sockets."""


@pytest.mark.usefixtures("only_laboratory")
@pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)
def test_workers_of_a_host_send_one_sum_over_its_link_where_a_ring_sends_more(hosts):
    if reason := reason_for_skipping():
        pytest.skip(reason)
    with Laboratory(hosts=2, mbit=CASE.mbit) as laboratory:
        as_one, ring = (measure(laboratory, CASE, hosts, side) for side in (AS_ONE, RING))
    streams = 1 if hosts[0] == hosts[1] else 2
    assert BYTES < as_one.on_link < HEADERS * BYTES
    assert streams * 1.5 * BYTES < ring.on_link < HEADERS * streams * 1.5 * BYTES
    leaders = [hosts.index(0), hosts.index(1)]
    for rank, sent in enumerate(as_one.on_sockets):
        assert (BYTES < sent < HEADERS * BYTES) if rank in leaders else sent < 0.05 * BYTES, as_one.on_sockets
    assert 1.0 < as_one.on_link / as_one.on_sockets[leaders[0]] < HEADERS
