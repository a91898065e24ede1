"""The checker that judges concurrent histories is judged here, on histories that people have
judged; in test_linearizability_random, on those that trying all orders has judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rdzv.conformance.linearizability import (
    UNKNOWN,
    Document,
    HistoryTooLargeError,
    Model,
    Operation,
    Queue,
    Value,
    check,
)

Row = tuple[int, int | None, str, tuple[Any, ...], Any]


def at(called: int, answered: int | None, kind: str, *arguments: Any, gives: Any = None) -> Row:
    """An operation; one with no time of an answer has an unknown outcome."""
    return called, answered, kind, arguments, UNKNOWN if answered is None else gives


def history_of(rows: Sequence[Row], key: str = "k") -> list[Operation]:
    return [
        Operation(f"client {number}", kind, key, arguments, answer, called, answered)
        for number, (called, answered, kind, arguments, answer) in enumerate(rows)
    ]


def verdict(model: Model, *rows: Row) -> str | None:
    return check(history_of(rows), model)


# Values


def test_an_empty_history_is_good() -> None:
    assert verdict(Value()) is None


def test_what_overlaps_may_come_in_any_order() -> None:
    write = at(0, 10, "set", b"new")
    old = at(0, 0, "set", b"old")
    for seen in (b"old", b"new"):
        assert verdict(Value(), old, write, at(5, 6, "get", gives=seen)) is None


def test_a_stale_read_is_bad() -> None:
    rows = [at(0, 1, "set", b"old"), at(2, 3, "set", b"new"), at(4, 5, "get", gives=b"old")]
    assert verdict(Value(), *rows) is not None


def test_two_reads_do_not_see_time_go_back() -> None:
    rows = [
        at(0, 1, "set", b"old"),
        at(2, 20, "set", b"new"),
        at(5, 6, "get", gives=b"new"),
        at(7, 8, "get", gives=b"old"),
    ]
    assert verdict(Value(), *rows) is not None
    assert verdict(Value(), *rows[:2], rows[3], at(9, 10, "get", gives=b"new")) is None


def test_a_read_from_the_future_is_bad() -> None:
    assert verdict(Value(), at(0, 1, "get", gives=b"x"), at(2, 3, "set", b"x")) is not None
    assert verdict(Value(), at(0, 2, "get", gives=b"x"), at(2, 3, "set", b"x")) is None


def test_keys_are_told_apart() -> None:
    first = history_of([at(0, 1, "set", b"1"), at(2, 3, "get", gives=b"1")], "a")
    other = history_of([at(0, 1, "set", b"2"), at(2, 3, "get", gives=b"1")], "b")
    assert check(first, Value()) is None
    problem = check([*first, *other], Value())
    assert "'b'" in problem
    assert "'a'" not in problem


def test_a_compare_set_is_one_step() -> None:
    rows = [
        at(0, 1, "set", b"0"),
        at(2, 9, "compare_set", b"0", b"a", gives=b"a"),
        at(2, 9, "compare_set", b"0", b"b", gives=b"a"),
    ]
    assert verdict(Value(), *rows) is None
    both = replace_answer(rows, 2, b"b")
    assert verdict(Value(), *both) is not None


def replace_answer(rows: Sequence[Row], index: int, answer: Any) -> list[Row]:
    changed = list(rows)
    changed[index] = (*rows[index][:4], answer)
    return changed


def test_a_value_that_is_not_there() -> None:
    good = [
        at(0, 1, "check", gives=False),
        at(2, 3, "delete", gives=False),
        at(4, 5, "compare_set", b"x", b"y", gives=b"x"),
        at(6, 7, "compare_set", b"", b"y", gives=b"y"),
        at(8, 9, "delete", gives=True),
        at(10, 11, "append", b"a"),
        at(12, 13, "append", b"b"),
        at(14, 15, "get", gives=b"ab"),
    ]
    assert verdict(Value(), *good) is None
    for index, wrong in enumerate([True, True, b"y", b"", False, b"", b"", b"ba"]):
        assert verdict(Value(), *replace_answer(good, index, wrong)) is not None, index
    assert verdict(Value(), at(0, 1, "get", gives=b"")) is not None


def test_a_lost_or_double_count_is_bad() -> None:
    adds = [at(0, 9, "add", 1, gives=1), at(0, 9, "add", 1, gives=2)]
    assert verdict(Value(), *adds, at(10, 11, "get", gives=b"2")) is None
    assert verdict(Value(), *adds, at(10, 11, "get", gives=b"3")) is not None
    assert verdict(Value(), *adds, at(10, 11, "add", 1, gives=2)) is not None
    assert verdict(Value(), *replace_answer(adds, 1, 1)) is not None


def test_a_lost_append_is_bad() -> None:
    appends = [at(0, 9, "append", b"a"), at(0, 9, "append", b"b")]
    for both in (b"ab", b"ba"):
        assert verdict(Value(), *appends, at(10, 11, "get", gives=both)) is None
    for lost in (b"a", b"b", b"aab"):
        assert verdict(Value(), *appends, at(10, 11, "get", gives=lost)) is not None


def test_a_text_tells_the_order_of_many_appends() -> None:
    appends = [at(0, 100, "append", b"%02d" % n) for n in range(30)]
    text = b"".join(b"%02d" % n for n in reversed(range(30)))
    assert verdict(Value(), *appends, at(200, 201, "get", gives=text)) is None
    # What comes behind the last text that was seen can be anything.
    assert verdict(Value(), *appends, at(50, 51, "get", gives=text[:20])) is None
    assert verdict(Value(), *appends, at(200, 201, "get", gives=text[2:])) is not None
    # A text may begin anew, so this rule is not for keys that are set or deleted.
    anew = [at(300, 301, "set", b"x"), at(302, 303, "get", gives=b"x")]
    few = [appends[0], at(200, 201, "get", gives=b"00")]
    assert verdict(Value(), *few, *anew) is None


# Outcomes that nobody knows


@pytest.mark.parametrize("count", ["0", "1"])
def test_what_was_not_answered_may_have_happened_or_not(count: str) -> None:
    rows = [at(0, 1, "set", b"0"), at(2, None, "add", 1)]
    assert verdict(Value(), *rows, at(5, 6, "get", gives=count.encode())) is None


def test_what_was_not_answered_may_happen_late_but_once() -> None:
    lost = at(0, None, "add", 1)
    zero, one, two = (at(n, n + 1, "add", 0, gives=n // 10) for n in (5, 10, 20))
    assert verdict(Value(), lost, zero, one) is None
    assert verdict(Value(), lost, zero, two) is not None
    assert verdict(Value(), lost, zero, one, at(30, 31, "add", 0, gives=0)) is not None
    assert verdict(Value(), lost, lost, zero, one, two) is None


def test_what_was_not_answered_does_not_happen_before_its_call() -> None:
    lost = at(7, None, "add", 1)
    assert verdict(Value(), at(5, 6, "add", 0, gives=1), lost) is not None
    assert verdict(Value(), at(5, 8, "add", 0, gives=1), lost) is None


def test_many_lost_answers_are_no_burden() -> None:
    rows = [at(n, None, "add", 1) for n in range(40)]
    rows += [at(100 + n, 101 + n, "add", 0, gives=n) for n in range(0, 40, 2)]
    assert verdict(Value(), *rows) is None
    assert verdict(Value(), *rows, at(200, 201, "add", 0, gives=41)) is not None
    sets = [at(n, None, "set", b"%d" % n) for n in range(40)]
    sets += [at(100 + n, 101 + n, "get", gives=b"%d" % n) for n in range(0, 40, 3)]
    assert verdict(Value(), *sets) is None
    assert verdict(Value(), *sets, at(200, 201, "get", gives=b"0")) is not None


# Queues


def test_a_queue_is_first_in_first_out() -> None:
    pushes = [at(0, 1, "push", b"1"), at(2, 3, "push", b"2")]
    first, second = at(4, 5, "pop", gives=b"1"), at(6, 7, "pop", gives=b"2")
    end = [at(8, 9, "len", gives=0), at(10, 11, "pop", gives=None)]
    assert verdict(Queue(), *pushes, at(3, 4, "len", gives=2), first, second, *end) is None
    assert verdict(Queue(), *pushes, at(4, 5, "pop", gives=b"2")) is not None
    assert verdict(Queue(), *pushes, first, at(6, 7, "pop", gives=b"1")) is not None
    assert verdict(Queue(), *pushes, at(4, 5, "pop", gives=None)) is not None
    assert verdict(Queue(), *pushes, first, at(6, 7, "len", gives=0)) is not None
    assert verdict(Queue(), at(0, 1, "pop", gives=b"1"), at(2, 3, "push", b"1")) is not None


def test_a_lost_pop_takes_at_most_one() -> None:
    rows = [at(n, n, "push", b"%d" % n) for n in range(3)] + [at(3, None, "pop")]
    for seen in (b"0", b"1"):
        assert verdict(Queue(), *rows, at(4, 5, "pop", gives=seen)) is None
    assert verdict(Queue(), *rows, at(4, 5, "pop", gives=b"2")) is not None


def test_lost_pops_are_no_burden_where_others_took_what_they_could_have_taken() -> None:
    """What each of them may have taken, or not, and when, would be too many orders to try."""
    size = 40
    rows = [at(n, n, "push", b"%d" % n) for n in range(size)]
    lost = [at(size, None, "pop") for _ in range(12)]
    pops = [at(size + n, size + 2 * n + 9, "pop", gives=b"%d" % n) for n in range(size)]
    end = at(500, 501, "pop", gives=None)
    assert check(history_of([*rows, *lost, *pops, end]), Queue(), steps_max=1000) is None
    assert verdict(Queue(), *rows, *lost, *pops, at(500, 501, "len", gives=1)) is not None


# The document


CREATED = at(0, 1, "set_state", b"1", None, gives=(b"1", "t1", True))
REPLACED = at(2, 3, "set_state", b"2", "t1", gives=(b"2", "t2", True))


def test_a_document_is_replaced_by_token() -> None:
    good = [
        at(0, 0, "get_state", gives=None),
        at(0, 0, "set_state", b"0", "strange", gives=None),
        CREATED,
        at(1, 2, "set_state", b"3", None, gives=(b"1", "t1", False)),
        REPLACED,
        at(4, 5, "set_state", b"3", "t1", gives=(b"2", "t2", False)),
        at(6, 7, "get_state", gives=(b"2", "t2")),
    ]
    assert verdict(Document(), *good) is None


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(at(4, 5, "get_state", gives=(b"1", "t1")), id="stale read"),
        pytest.param(at(4, 5, "get_state", gives=None), id="lost document"),
        pytest.param(at(4, 5, "get_state", gives=(b"2", "t1")), id="document of another token"),
        pytest.param(at(4, 5, "get_state", gives=(b"2", "t3")), id="two tokens of one version"),
        pytest.param(
            at(4, 5, "set_state", b"3", "t1", gives=(b"3", "t3", True)), id="stale token wins"
        ),
        pytest.param(
            at(4, 5, "set_state", b"3", None, gives=(b"3", "t3", True)), id="blind write wins"
        ),
        pytest.param(
            at(4, 5, "set_state", b"3", "t2", gives=(b"3", "t1", True)), id="token used again"
        ),
        pytest.param(
            at(4, 5, "set_state", b"2", "t2", gives=(b"2", "t2", True)), id="token not moved"
        ),
        pytest.param(
            at(4, 5, "set_state", b"3", "t2", gives=(b"2", "t2", False)), id="right token loses"
        ),
        pytest.param(
            at(4, 5, "set_state", b"3", "t1", gives=(b"3", "t3", False)), id="written and denied"
        ),
        pytest.param(
            at(4, 5, "set_state", b"3", "t2", gives=(b"2", "t3", True)), id="other bytes written"
        ),
        pytest.param(at(4, 5, "set_state", b"3", "t2", gives=None), id="nothing there after all"),
    ],
)
def test_a_document_that_breaks_its_word(bad: Row) -> None:
    assert verdict(Document(), CREATED, REPLACED, bad) is not None


def test_a_lost_update_is_bad() -> None:
    both = [
        at(2, 9, "set_state", b"a", "t1", gives=(b"a", "ta", True)),
        at(2, 9, "set_state", b"b", "t1", gives=(b"b", "tb", True)),
    ]
    assert verdict(Document(), CREATED, *both) is not None
    told = replace_answer(both, 1, (b"a", "ta", False))
    assert verdict(Document(), CREATED, *told) is None


def test_a_lost_answer_leaves_a_token_to_be_learnt() -> None:
    lost = at(2, None, "set_state", b"2", "t1")
    for token, good in (("t2", True), ("t1", False)):
        seen = at(4, 5, "get_state", gives=(b"2", token))
        assert (verdict(Document(), CREATED, lost, seen) is None) is good
    loser = at(4, 5, "set_state", b"3", "t1", gives=(b"2", "t2", False))
    next_one = at(6, 7, "set_state", b"3", "t2", gives=(b"3", "t3", True))
    assert verdict(Document(), CREATED, lost, loser, next_one) is None
    # It had lost already when it arrived, if it arrived.
    assert verdict(Document(), CREATED, REPLACED, at(4, None, "set_state", b"3", "t1")) is None
    stolen = at(6, 7, "get_state", gives=(b"3", "t3"))
    late = at(4, None, "set_state", b"3", "t1")
    assert verdict(Document(), CREATED, REPLACED, late, stolen) is not None


def test_tokens_are_compared_with_nothing_but_equality() -> None:
    rows = [
        at(0, 1, "set_state", b"1", None, gives=(b"1", [1], True)),
        at(2, 3, "set_state", b"2", [1], gives=(b"2", [2], True)),
        at(4, 5, "get_state", gives=(b"2", [2])),
    ]
    assert verdict(Document(), *rows) is None
    assert verdict(Document(), *replace_answer(rows, 2, (b"2", [1]))) is not None


# The explanation, and limits


def test_the_explanation_names_the_first_answer_that_cannot_be() -> None:
    rows = [at(n, n + 1, "add", 1, gives=n // 2 + 1) for n in range(0, 40, 2)]
    rows[12] = at(24, 25, "add", 1, gives=99)
    problem = verdict(Value(), *rows, at(20, 70, "check", gives=True), at(7, None, "add", 5))
    assert "key 'k', answer 13 of 21" in problem
    assert "add(1) -> 99   [client 12, 0.000 to 0.000 ms]" in problem
    assert "add(5) -> no answer" in problem
    assert "check() -> True" in problem
    assert "the state is b'12'" in problem
    assert "-> 14" not in problem


def test_the_first_answer_can_be_the_wrong_one() -> None:
    assert "the state is None" in verdict(Value(), at(0, 1, "get", gives=b"x"))


def test_a_token_is_shown() -> None:
    problem = verdict(Document(), CREATED, REPLACED, at(4, 5, "get_state", gives=None))
    assert "the state is b'2' with token 't2'" in problem


def test_a_history_that_is_too_large_says_so() -> None:
    # Nothing tells in which order ten values were pushed.
    rows = [at(0, 100, "push", b"%d" % n) for n in range(10)]
    rows.append(at(200, 201, "len", gives=11))
    with pytest.raises(HistoryTooLargeError, match="11 operations on 'k'"):
        check(history_of(rows), Queue(), steps_max=1000)


@pytest.mark.parametrize("model", [Document(), Value(), Queue()])
def test_an_unknown_kind_is_an_error(model: Model) -> None:
    with pytest.raises(ValueError, match="'jump'"):
        verdict(model, at(0, 1, "jump"))
