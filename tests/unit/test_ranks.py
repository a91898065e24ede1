"""Who gets which rank: see rdzv.ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from rdzv.ranks import RANK_ORDERS, assign_ranks, natural_key
from rdzv.state import Node, RosterEntry

SEEDS = range(300)


def _entry(name: str, hint: int | None = None, topology: str = "") -> RosterEntry:
    """Its id sorts otherwise than its address, so that nothing is ordered by the wrong one."""
    node = Node("".join(chr(0x10FFFF - ord(letter)) for letter in name), name)
    return RosterEntry(node, rank_hint=hint, topology=topology)


def _entries(names: str) -> list[RosterEntry]:
    return [_entry(name) for name in names.split()]


def _nodes(names: str) -> list[Node]:
    return [entry.node for entry in _entries(names)]


def _names(nodes: Sequence[Node]) -> str:
    return " ".join(node.address for node in nodes)


def _ranks(now: str, before: str = "", rank_order: str = "stable") -> str:
    return _names(assign_ranks(_entries(now), _nodes(before), rank_order))


# Natural order


@pytest.mark.parametrize(
    "ordered",
    [
        ["node", "node1", "node2", "node9", "node010a", "node10", "node11"],
        ["", "0", "9", "10", "99", "100", "a"],
        ["10.0.0.2", "10.0.0.10", "10.0.1.1", "10.0.10.1"],
        ["rack2-node1", "rack2-node10", "rack10-node1"],
        ["a1b2", "a1b10", "a2b1"],
        ["n2", "n٣", "n4", "n10", "n٣0"],
        ["7", "7a", "a", "a7"],
        ["n1", "n18446744073709551615", "n18446744073709551616"],
        ["fe80::1%eth0", "fe80::1%eth1", "fe80::2%eth0"],
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    for seed in range(10):
        shuffled = random.Random(seed).sample(ordered, len(ordered))
        assert sorted(shuffled, key=natural_key) == ordered


TEXTS = (
    *("", "0", "00", "1", "01", "001", "a", "A", "a1", "a01", "1a", "01a", "1.1", "1.01"),
    *("٣", "3", "3٣", "٣3", "n٣", "n3", "²", "n²", "½", "Ⅷ", "日本7", "日本07", "😀", "\0"),
    *(" 1", "1 ", "߁", "n߁", "1߁", "9" * 1000, "0" * 1000),
)


def test_natural_order_is_total() -> None:
    """Digits of other scripts and leading zeros included: no two texts are equal, all compare."""
    keys = {text: natural_key(text) for text in TEXTS}
    assert len(set(keys.values())) == len(TEXTS)
    ordered = sorted(TEXTS, key=natural_key)
    for seed in range(20):
        shuffled = random.Random(seed).sample(TEXTS, len(TEXTS))
        assert sorted(shuffled, key=natural_key) == ordered
    for first, second in itertools.pairwise(ordered):
        assert keys[first] < keys[second]


# stable


@pytest.mark.parametrize(
    ("before", "now", "ranks"),
    [
        ("", "c a b", "a b c"),
        ("c a b", "a b c", "c a b"),
        ("c a b", "b c a d", "c a b d"),
        ("a b c", "a c x", "a x c"),
        ("a b c d", "a c d", "a d c"),
        ("a b c d", "a c d x", "a x c d"),
        ("e d c b a", "c a x", "a x c"),
        ("d c b a", "a b", "b a"),
        ("x y z c b a", "a b c", "c b a"),
        ("a b c", "b c x", "b x c"),
        ("a b c", "c x y", "c x y"),
        ("a b c", "x y z", "x y z"),
        ("a b c", "x y c b", "b x c y"),
        ("a b c d", "b c d", "d b c"),
        ("a b c d e", "d e x", "d e x"),
        ("a", "b", "b"),
        ("a b", "", ""),
    ],
)
def test_stable(before: str, now: str, ranks: str) -> None:
    assert _ranks(now, before) == ranks


def test_stable_is_the_default() -> None:
    assert _names(assign_ranks(_entries("a b"), _nodes("b a"))) == "b a"


def test_newcomers_fill_gaps_in_natural_order() -> None:
    assert _ranks("node10 node9 a c node1", "a b c") == "a node1 c node9 node10"


# Hints


def test_hints_order_newcomers() -> None:
    entries = [_entry("a", 9), _entry("b"), _entry("c", 1), _entry("d", 0), _entry("e", 1)]
    for rank_order in RANK_ORDERS:
        assert _names(assign_ranks(entries, [], rank_order)) == "d c e a b"


def test_a_hint_does_not_move_a_survivor_of_a_stable_order() -> None:
    entries = [_entry("a", 9), _entry("b", 1), _entry("x", 5), _entry("y", 0)]
    assert _names(assign_ranks(entries, _nodes("a b"))) == "a b y x"


def test_a_hint_however_large_goes_before_none() -> None:
    entries = [_entry("a"), _entry("b", 1 << 62), _entry("c", 1 << 80)]
    assert _names(assign_ranks(entries, [], "natural")) == "b c a"


def test_the_id_decides_between_equal_addresses() -> None:
    entries = [RosterEntry(Node(f"host-{pid}", "host")) for pid in (10, 9, 100)]
    for rank_order in RANK_ORDERS:
        ranked = assign_ranks(entries, [], rank_order)
        assert [node.id for node in ranked] == ["host-9", "host-10", "host-100"]


# natural


@pytest.mark.parametrize(
    ("before", "now", "ranks"),
    [
        ("", "node10 node9 node1", "node1 node9 node10"),
        ("c b a", "a b c", "a b c"),
        ("c", "a b c d", "c a b d"),
        ("d c", "a b c d", "c a b d"),
        ("x y", "b a", "a b"),
        ("x", "", ""),
    ],
)
def test_natural(before: str, now: str, ranks: str) -> None:
    assert _ranks(now, before, "natural") == ranks


# topology

RACKS = [
    *(_entry("a", topology="rack10"), _entry("b", topology="rack9"), _entry("c", topology="rack2")),
    *(_entry("d", topology="rack9"), _entry("e", topology="rack10"), _entry("f", 0, "rack10")),
]


@pytest.mark.parametrize(
    ("before", "ranks"),
    [
        ("", "f a e c b d"),  # the hint makes f the first, so its rack is the first
        ("d", "d b c f a e"),
        ("e", "e f a c b d"),
        ("d c", "c b d f a e"),
        ("x", "f a e c b d"),
    ],
)
def test_topology(before: str, ranks: str) -> None:
    assert _names(assign_ranks(RACKS, _nodes(before), "topology")) == ranks


def test_nodes_without_a_label_are_neighbours() -> None:
    entries = [_entry("a", topology="r"), _entry("b"), _entry("c", topology="r"), _entry("d")]
    assert _names(assign_ranks(entries, [], "topology")) == "a c b d"
    assert _names(assign_ranks(entries, _nodes("d"), "topology")) == "d b a c"


# What holds in every order


def _case(seed: int) -> tuple[random.Random, list[RosterEntry], list[Node]]:
    """Random nodes of now, and random participants of before, some of them the same."""
    chance = random.Random(seed)
    known = [
        RosterEntry(
            Node(f"id{number}", chance.choice([f"node{number}", "node", f"{number}", "ñ٣"])),
            rank_hint=chance.choice([None, None, 0, 1, 7]),
            topology=chance.choice(["", "rack1", "rack2", "rack10"]),
        )
        for number in range(16)
    ]
    now = chance.sample(known, chance.randint(1, 12))
    before = [entry.node for entry in chance.sample(known, chance.randint(0, 12))]
    return chance, now, before


def _cases() -> Iterator[tuple[random.Random, list[RosterEntry], list[Node], str]]:
    for seed in SEEDS:
        for rank_order in RANK_ORDERS:
            yield (*_case(seed), rank_order)


def test_everyone_gets_one_rank() -> None:
    for _, now, before, rank_order in _cases():
        ranked = assign_ranks(now, before, rank_order)
        assert len(ranked) == len(now)
        assert set(ranked) == {entry.node for entry in now}


def test_rank_0_goes_to_a_survivor() -> None:
    """A newcomer without a checkpoint must not broadcast its weights."""
    with_survivors = 0
    for _, now, before, rank_order in _cases():
        if not {entry.node for entry in now} & set(before):
            continue
        with_survivors += 1
        assert assign_ranks(now, before, rank_order)[0] in before
    assert with_survivors > len(SEEDS)


def test_everyone_who_knows_the_same_computes_the_same() -> None:
    for chance, now, before, rank_order in _cases():
        ranked = assign_ranks(now, before, rank_order)
        for _ in range(3):
            shuffled = chance.sample(now, len(now))
            assert assign_ranks(shuffled, before, rank_order) == ranked


def test_an_address_that_has_changed_makes_no_newcomer() -> None:
    """The id is what a node is known by."""
    for _, now, before, rank_order in _cases():
        moved = [Node(node.id, "elsewhere") for node in before]
        assert assign_ranks(now, moved, rank_order) == assign_ranks(now, before, rank_order)


def test_survivors_keep_a_rank_that_still_exists() -> None:
    for seed in SEEDS:
        _, now, before = _case(seed)
        ranked = assign_ranks(now, before)
        kept = {node: rank for rank, node in enumerate(before) if rank < len(now)}
        moved = [node for node in ranked if node in kept and ranked[kept[node]] != node]
        # Only to rank 0, which must not be a newcomer's, and only if no other survivor can have it.
        assert moved in ([], [ranked[0]])
        if moved:
            displaced = [node for node in ranked if node in before[len(now) :]]
            assert not displaced
            assert before[0] not in ranked
            survivors = [rank for node, rank in kept.items() if node in ranked]
            assert kept[ranked[0]] == min(survivors)


def test_gaps_go_to_displaced_survivors_before_newcomers() -> None:
    for seed in SEEDS:
        _, now, before = _case(seed)
        ranked = assign_ranks(now, before)
        displaced = [node for node in before[len(now) :] if node in ranked]
        newcomers = [node for node in ranked if node not in before]
        fillers = [node for node in ranked if node in displaced or node in newcomers]
        assert fillers == displaced + newcomers
        # assign_ranks without a past is the natural order of those entries alone.
        alone = [entry for entry in now if entry.node in newcomers]
        assert newcomers == list(assign_ranks(alone, [], "natural"))


def test_natural_order_but_for_rank_0() -> None:
    for seed in SEEDS:
        _, now, before = _case(seed)
        ranked = list(assign_ranks(now, before, "natural"))
        without_past = assign_ranks(now, [], "natural")
        survivors = [node for node in without_past if node in before]
        first = survivors[0] if survivors else without_past[0]
        assert ranked == [first, *(node for node in without_past if node != first)]


def test_topology_groups_are_side_by_side() -> None:
    for seed in SEEDS:
        _, now, before = _case(seed)
        labels = {entry.node: entry.topology for entry in now}
        ranked = assign_ranks(now, before, "topology")
        groups = [label for label, _ in itertools.groupby(ranked, key=labels.__getitem__)]
        assert len(groups) == len(set(groups)), "a group is torn apart"
        assert groups[1:] == sorted(groups[1:], key=natural_key)
        for label in groups[1:]:
            members = [entry for entry in now if entry.topology == label]
            assert [n for n in ranked if labels[n] == label] == list(
                assign_ranks(members, [], "natural")
            )
        assert ranked[0] == assign_ranks(now, before, "natural")[0]
        head = [entry for entry in now if entry.topology == groups[0]]
        assert list(ranked[: len(head)]) == list(assign_ranks(head, before, "natural"))
