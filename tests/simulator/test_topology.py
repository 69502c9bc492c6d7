"""Network topology: parsing, error marks, and links that match the closed forms."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import LaunchError
from stretto.simulator.event_queue import EventQueue
from stretto.simulator.network.flows import SimNetwork
from stretto.simulator.network.links import SEGMENT_BYTES, Exchange, Links
from stretto.simulator.network.max_min_fairness import FluidModel
from stretto.simulator.network.topology import Link, Network, parse
from stretto.transport import shared_memory

rates = st.floats(min_value=0, exclude_min=True, allow_infinity=True)
links = st.builds(Link, rates, rates, st.floats(min_value=0, allow_infinity=False))
plain = st.builds(
    Network,
    link=links,
    server=st.none() | links,
    loss=st.floats(0, 1, exclude_max=True),
    reduce=st.sampled_from(["ring", "tree"]),
    burst=st.floats(min_value=0, allow_infinity=False),
)
hosted = st.builds(
    lambda one, size, link: replace(one, hosts=size, between=link), plain, st.integers(1, 10**9 - 1), links
)
networks = (plain | hosted).flatmap(
    lambda one: st.sampled_from(
        [
            one,
            *(replace(one, server=None, **{at: True}) for at in ("with_workers", "in_worker")),
            replace(one, loss=0.0),
        ]
    )
)


@given(networks)
def test_text_can_be_parsed_back(network: Network) -> None:
    assert parse(str(network)) == network


@given(networks, st.randoms(use_true_random=False))
def test_order_of_parts_case_and_spaces_do_not_matter(network: Network, dice) -> None:
    parts = str(network).upper().split(", ")
    dice.shuffle(parts)
    assert parse(" ,  ".join(parts)) == network


SLOW = Link(100e6, 100e6, 0.02)


@pytest.mark.parametrize(
    ("text", "network", "printed"),
    [
        ("instant", Network(), "instant"),
        ("100Mbit/s 20ms", Network(SLOW), "100Mbit/s 20ms"),
        ("100000 kBIT/S 20000 us", Network(SLOW), "100Mbit/s 20ms"),
        ("0.1gbit/s 0.02s", Network(SLOW), "100Mbit/s 20ms"),
        ("1e3Mbit/s", Network(Link(1e9, 1e9)), "1Gbit/s"),
        ("2tbit/s", Network(Link(2e12, 2e12)), "2Tbit/s"),
        ("1500.bit/s", Network(Link(1500, 1500)), "1.5kbit/s"),
        ("100Mbit/s up 20Mbit/s down", Network(Link(100e6, 20e6)), "100Mbit/s up 20Mbit/s down"),
        ("20Mbit/s down 100Mbit/s up 20ms", Network(Link(100e6, 20e6, 0.02)), "100Mbit/s up 20Mbit/s down 20ms"),
        ("instant up 1Mbit/s down", Network(Link(inf, 1e6)), "instant up 1Mbit/s down"),
        (
            "hosts of 8 on 10Gbit/s 50us, 1Gbit/s 1ms between",
            Network(Link(10e9, 10e9, 50e-6), 8, Link(1e9, 1e9, 1e-3)),
            "hosts of 8 on 10Gbit/s 50us, 1Gbit/s 1ms between",
        ),
        (
            "1Gbit/s up 2Gbit/s down between, hosts of 2 on instant 1ms",
            Network(Link(latency=1e-3), 2, Link(1e9, 2e9, 1e-3)),
            "hosts of 2 on instant 1ms, 1Gbit/s up 2Gbit/s down between",
        ),
        (
            "server 1Gbit/s 5ms, 100Mbit/s 20ms",
            Network(SLOW, server=Link(1e9, 1e9, 5e-3)),
            "100Mbit/s 20ms, server 1Gbit/s 5ms",
        ),
        (
            "100Mbit/s 20ms, server 1Gbit/s",
            Network(SLOW, server=Link(1e9, 1e9, 0.02)),
            "100Mbit/s 20ms, server 1Gbit/s",
        ),
        (
            "100Mbit/s 20ms, server 1Gbit/s 0ms",
            Network(SLOW, server=Link(1e9, 1e9)),
            "100Mbit/s 20ms, server 1Gbit/s 0us",
        ),
        (
            "hosts of 8 on 10Gbit/s 50us, 1Gbit/s 1ms between, server 2Gbit/s",
            Network(Link(10e9, 10e9, 50e-6), 8, Link(1e9, 1e9, 1e-3), Link(2e9, 2e9, 1e-3)),
            "hosts of 8 on 10Gbit/s 50us, 1Gbit/s 1ms between, server 2Gbit/s",
        ),
        ("servers with workers", Network(with_workers=True), "instant, servers with workers"),
        ("servers in worker 0", Network(in_worker=True), "instant, servers in worker 0"),
        ("loss 1%", Network(loss=0.01), "instant, loss 1%"),
        ("loss 0.25%, TREE", Network(loss=0.0025, reduce="tree"), "instant, loss 0.25%, tree"),
        ("ring", Network(), "instant"),
    ],
)
def test_texts_are_parsed(text: str, network: Network, printed: str) -> None:
    assert parse(text) == network
    assert str(network) == printed


@pytest.mark.parametrize(
    ("text", "marked", "says"),
    [
        ("", "", "a speed above 0"),
        ("100Mbit/s 20mss", "20mss", "a time, like 20ms"),
        ("100Mbit/s 20", "20", "a time"),
        ("100Mbit/s 20ms,", "", "a speed above 0"),
        ("100Mbit/s 20ms ring", "ring", "`,` or the end"),
        ("100MB/s", "100MB/s", "a speed above 0"),
        ("20ms", "20ms", "a speed above 0"),
        ("0Mbit/s", "0Mbit/s", "a speed above 0"),
        ("-1Mbit/s", "-1Mbit/s", "a speed above 0"),
        ("²Mbit/s", "²Mbit/s", "a speed above 0"),
        ("9" * 400 + "Mbit/s", "9" * 400 + "Mbit/s", "a speed above 0"),
        ("0." + "0" * 400 + "1bit/s", "0." + "0" * 400 + "1bit/s", "a speed above 0"),
        ("100Mbit/s up", "", "the speed down"),
        ("100Mbit/s up 20Mbit/s", "", "down"),
        ("100Mbit/s down 20Mbit/s down", "down", "up"),
        ("100Mbit/s, 20Mbit/s", "20Mbit/s", "the link of workers only once"),
        ("100Mbit/s, hosts of 8 on 1Gbit/s, 1Gbit/s between", "hosts", "the link of workers only once"),
        ("hosts 8", "8", "of"),
        ("hosts of 0 on 1Gbit/s", "0", "a whole number of at least 1"),
        ("hosts of 2.5 on 1Gbit/s", "2.5", "a whole number"),
        ("hosts of 8 at 1Gbit/s", "at", "on"),
        ("loss 1%, hosts of 8 on 1Gbit/s", "hosts", "also what is between hosts"),
        ("loss 1%, 1Gbit/s between", "1Gbit/s", "also `hosts of 8 on 10Gbit/s`"),
        ("server", "", "a speed, like 1Gbit/s"),
        ("server 1Gbit/s, server 1Gbit/s", "server", "the link of servers only once"),
        ("server 1Gbit/s, servers with workers", "servers", "the link of servers only once"),
        ("servers with shards", "shards", "workers"),
        ("servers in worker 1", "1", "0"),
        ("servers in worker 0, servers with workers", "servers", "the link of servers only once"),
        ("loss 100%", "100%", "less than 100%"),
        ("loss 0.1", "0.1", "less than 100%"),
        ("loss 1%, loss 2%", "loss", "loss only once"),
        ("ring, tree", "tree", "ring or tree only once"),
        ("\tfast\nnet", "fast", "a speed above 0"),
    ],
)
def test_invalid_text_is_refused_with_its_word_marked(text: str, marked: str, says: str) -> None:
    with pytest.raises(LaunchError) as raised:
        parse(text)
    problem, got, mark, expected, to_type = str(raised.value).split("\n")
    assert problem == f"--network cannot be read: {marked or 'something is missing at the end'}"
    assert got == "  got: " + text.replace("\t", " ").replace("\n", " ")
    assert mark == " " * (len("  got: ") + text.rindex(marked)) + "^" * max(len(marked), 1)
    assert says in expected
    assert to_type == '  try: --network "100Mbit/s 20ms"'


@given(
    st.text(
        alphabet="10.,% \tMbit/sup down instant hosts of on between server with workers loss ring tree²", max_size=40
    )
)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        network = parse(text)
    except LaunchError:
        return
    assert parse(str(network)) == network


def ends(one: Links, *pairs: tuple[int, int]) -> list[tuple[list[float], float]]:
    """Return the speeds of the links of a path in Mbit/s."""
    return [
        ([one.capacities[link] * 8 / 1e6 for link in path], late) for path, late in (one.path(*pair) for pair in pairs)
    ]


def test_every_worker_has_an_uplink_and_a_downlink() -> None:
    one = Links(parse("8Mbit/s up 16Mbit/s down 20ms"), workers=3, shards=2)
    assert one.capacities == [1e6, 2e6] * 5
    for source in (0, 1, 2, -1, -2):
        for target in (0, 1, 2, -1, -2):
            path = ((one.up(source), one.down(target)), 0.02) if source != target else ((), 0.0)
            assert one.path(source, target) == path
    used = {one.up(end) for end in range(-2, 3)} | {one.down(end) for end in range(-2, 3)}
    assert used == set(range(10))


def test_a_host_shares_one_uplink_and_one_downlink() -> None:
    one = Links(parse("hosts of 2 on 80Mbit/s 1ms, 1Mbit/s up 2Mbit/s down 5ms between"), workers=5)
    assert ends(one, (0, 1), (1, 2), (4, 0), (2, 2)) == [
        ([80, 80], 0.001),
        ([1, 2], 0.005),
        ([1, 2], 0.005),
        ([], 0.0),
    ]
    assert one.path(0, 2) == one.path(1, 3) != one.path(0, 4)
    assert one.path(0, 1)[0] == (one.up(0), one.down(1))
    assert ends(one, (0, -1), (-1, 4)) == [([1, 2], 0.005)] * 2
    assert len(one.capacities) == 2 * (5 + 3 + 1)


def test_a_server_has_its_own_link_or_a_workers() -> None:
    one = Links(parse("8Mbit/s 20ms, server 16Mbit/s 5ms"), workers=2, shards=2)
    assert ends(one, (1, -1), (-2, 0), (0, 1), (-1, -2)) == [
        ([8, 16], 0.005),
        ([16, 8], 0.005),
        ([8, 8], 0.02),
        ([16, 16], 0.005),
    ]
    assert one.path(1, -1)[0][0] == one.path(1, -2)[0][0] and one.path(0, -1) != one.path(0, -2)
    one = Links(parse("hosts of 2 on 80Mbit/s, 8Mbit/s between, server 16Mbit/s"), workers=2, shards=1)
    assert ends(one, (1, -1), (-1, 0)) == [([8, 16], 0), ([16, 8], 0)]


def test_servers_with_workers_share_their_links() -> None:
    one = Links(parse("8Mbit/s 20ms, servers with workers"), workers=3, shards=4)
    assert len(one.capacities) == 6
    for shard in range(4):
        home = shard % 3
        assert (one.up(-1 - shard), one.down(-1 - shard)) == (one.up(home), one.down(home))
        assert one.path(home, -1 - shard) == one.path(-1 - shard, home) == ((), 0.0)
        for other in {0, 1, 2} - {home}:
            assert one.path(other, -1 - shard) == one.path(other, home)
            assert one.path(-1 - shard, other) == one.path(home, other)
    one = Links(parse("hosts of 2 on 80Mbit/s 1ms, 8Mbit/s 5ms between, servers with workers"), workers=4, shards=1)
    assert ends(one, (0, -1), (1, -1), (2, -1), (-1, 3)) == [
        ([], 0),
        ([80, 80], 0.001),
        ([8, 8], 0.005),
        ([8, 8], 0.005),
    ]


def test_servers_in_worker_0_use_its_link() -> None:
    one = Links(parse("8Mbit/s 20ms, servers in worker 0"), workers=3, shards=2)
    assert one.in_worker and len(one.capacities) == 6
    for shard in range(2):
        assert one.path(0, -1 - shard) == one.path(-1 - shard, 0) == ((), 0.0)
        assert one.path(2, -1 - shard) == one.path(2, 0)


@pytest.mark.parametrize("at", ["servers with workers", "servers in worker 0"])
def test_partition_separates_machines_only(at: str) -> None:
    queue, came = EventQueue(), {}
    net = SimNetwork(queue, Links(parse(f"8Mbit/s, {at}"), workers=3, shards=1))
    net.partition({0})
    assert net.is_partitioned(1) and not net.is_partitioned(0)
    for source, target in ((0, -1), (1, -1), (-1, 2), (1, 2)):
        net.send(source, target, 1000, lambda pair=(source, target): came.update({pair: queue.now}))
    while queue.step():
        pass
    assert came.keys() == {(0, -1), (1, 2)}


def test_links_of_infinite_speed_are_left_out() -> None:
    one = Links(parse("instant up 8Mbit/s down 1ms, server instant 2ms"), workers=2, shards=1)
    assert one.path(0, 1) == ((one.down(1),), 0.001)
    assert one.path(0, -1) == ((), 0.002)
    assert Links(Network(), 2).all_reduce(1e9) == [(1e9, (), 0.0)]


@given(st.floats(0, 1, exclude_max=True))
def test_loss_is_goodput(loss: float) -> None:
    assert Links(Network(SLOW, loss=loss), 1).capacities == pytest.approx([12.5e6 * (1 - loss)] * 4)


def seconds(one: Links, exchange: Exchange) -> float:
    """Return the seconds of a collective without other traffic."""
    amount, path, latency = exchange
    fluid = FluidModel(one.capacities)
    fluid.start(0, amount, path)
    return fluid.next_end() + latency


@given(st.integers(1, 70), st.floats(1, 1e9), st.sampled_from(["ring", "tree"]))
def test_collectives_take_their_closed_forms(workers: int, nbytes: float, how: str) -> None:
    one = Links(parse(f"80Mbit/s 20ms, {how}"), workers)
    hop, late, depth = nbytes / 10e6, 0.02, ceil(log2(workers))
    ring = 2 * (workers - 1) / workers * hop + 2 * (workers - 1) * late
    expected = ring if how == "ring" else 2 * depth * (hop + late)
    assert seconds(one, *one.all_reduce(nbytes)) == pytest.approx(expected)
    assert seconds(one, one.gather(nbytes)) == pytest.approx((workers - 1) * (hop + late))
    assert seconds(one, one.broadcast(workers // 2, nbytes)) == pytest.approx(depth * (hop + late))


@given(st.integers(1, 30), st.data())
def test_a_ring_uses_each_link_and_a_tree_reaches_everyone(workers: int, data: st.DataObject) -> None:
    one = Links(parse("80Mbit/s"), workers)
    everything = set(range(2 * workers)) if workers > 1 else set()
    assert set(one.all_reduce(1.0)[0][1]) == set(one.gather(1.0)[1]) == everything
    assert set(Links(parse("80Mbit/s, tree"), workers).all_reduce(1.0)[0][1]) == everything
    root = data.draw(st.integers(0, workers - 1))
    reached = {link for link in one.broadcast(root, 1.0)[1] if link % 2}
    assert reached == {one.down(worker) for worker in range(workers) if worker != root}


def test_half_of_a_binomial_tree_forwards() -> None:
    one = Links(parse("80Mbit/s"), 8)
    assert {link for link in one.broadcast(0, 1.0)[1] if link % 2 == 0} == {one.up(worker) for worker in (0, 2, 4, 6)}
    assert {link // 2 for link in one.broadcast(3, 1.0)[1] if link % 2 == 0} == {3, 5, 7, 1}


def test_a_ring_crosses_each_host_once() -> None:
    one = Links(parse("hosts of 4 on 80Mbit/s 1ms, 8Mbit/s 5ms between"), workers=12)
    amount, path, latency = one.gather(12.0)
    assert (amount, latency) == (11 * 12.0, 11 * 0.005)
    assert len(path) == len(set(path)) == 2 * 12
    speeds = [one.capacities[link] for link in path]
    assert speeds.count(1e6) == 6 and speeds.count(10e6) == 18


def test_workers_of_a_host_add_there_and_the_first_of_each_host_exchange() -> None:
    one = Links(parse("hosts of 4 on 80Mbit/s 1ms, 8Mbit/s 5ms between"), workers=12)
    inside, between = one.all_reduce(12.0)
    assert (inside[0], inside[2]) == (12.0, 2 * 0.001)
    assert [one.capacities[link] for link in inside[1]] == [10e6] * 24
    assert (between[0], between[2]) == (2 * 2 / 3 * 12.0, 4 * 0.005)
    assert [one.capacities[link] for link in between[1]] == [1e6] * 6
    assert one.hosts([0, 1, 6, 11]) == [[0, 1], [6], [11]]
    assert one.all_reduce(12.0, [0, 1, 6])[0][1] == (one.up(0), one.down(0), one.up(1), one.down(1))
    assert one.all_reduce(12.0, [7, 4])[1] == (0.0, one.path(4, 8)[0][:1] + one.path(8, 4)[0][1:], 0.0)
    assert one.all_reduce(12.0, [0, 4, 8]) == [(2 * 2 / 3 * 12.0, one.gather(1.0, [0, 4, 8])[1], 4 * 0.005)]
    assert one.all_reduce(9 << 20)[1][2] == 3 * 4 * 0.005
    assert SEGMENT_BYTES == shared_memory.SEGMENT_BYTES


def test_collectives_of_members_exclude_other_workers() -> None:
    one, four = Links(parse("80Mbit/s 20ms"), 4), range(3)
    assert one.all_reduce(9.0, members=[3, 0, 1]) == [(12.0, one.gather(9.0, [0, 1, 3])[1], 4 * 0.02)]
    assert one.down(2) not in one.gather(1.0, [0, 1, 3])[1]
    assert one.broadcast(3, 1.0, [1, 3])[1] == (one.up(3), one.down(1))
    assert [one.gather(5.0, members=[2])] == one.all_reduce(5.0, members=[2]) == [(0.0, (), 0.0)]
    assert Links(parse("80Mbit/s 20ms"), 3).gather(1.0) == one.gather(1.0, four)


def test_the_slowest_hop_counts() -> None:
    one = Links(parse("hosts of 2 on 80Mbit/s 9ms, 8Mbit/s 5ms between"), workers=4)
    assert one.gather(1.0)[2] == 3 * 0.009
    assert one.broadcast(0, 1.0, [0, 2])[2] == 0.005


@pytest.mark.parametrize(
    ("room", "ranks", "hosts"),
    [
        (4, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (6, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (8, 4, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, 4, [[0, 2], [4, 6], [1, 3], [5, 7]]),
        (3, 4, [[0, 2, 4], [6], [1, 3, 5], [7]]),
    ],
)
def test_the_ranks_of_a_worker_share_a_host_that_has_room(room: int, ranks: int, hosts: list[list[int]]) -> None:
    one = Links(parse(f"hosts of {room} on 80Mbit/s 1ms, 8Mbit/s 5ms between"), 2, ranks=ranks)
    places = {process: next(number for number, host in enumerate(hosts) if process in host) for process in range(8)}
    assert one.processes(1) == [1, 3, 5, 7]
    assert [one.at_rank(rank) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert one.hosts(range(8)) == sorted(map(sorted, hosts))
    for process in range(1, 8):
        assert one.path(0, process)[1] == (0.001 if places[process] == places[0] else 0.005)


def test_rank_i_exchanges_with_rank_i_over_links_of_its_own() -> None:
    one = Links(parse("80Mbit/s 20ms"), 3, ranks=2)
    first, second = one.all_reduce(3e6, one.at_rank(0)), one.all_reduce(3e6, one.at_rank(1))
    assert first == Links(parse("80Mbit/s 20ms"), 3).all_reduce(3e6)
    assert [(amount, latency) for amount, _, latency in first] == [(amount, latency) for amount, _, latency in second]
    assert not set(first[0][1]) & set(second[0][1])
