"""The checker of concurrent histories on random ones: what a correct implementation does is always
accepted, and what was spoilt is judged as trying all orders judges it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rdzv.conformance.linearizability import (
    IMPOSSIBLE,
    UNKNOWN,
    Document,
    Model,
    Operation,
    Queue,
    State,
    Value,
    check,
)


def by_trying_all_orders(operations: Sequence[Operation], model: Model) -> bool:
    """What the checker must say, in the words of the definition."""
    answered = [each for each in operations if each.known]
    lost = [each for each in operations if not each.known]
    return any(
        _explains(order, model)
        for count in range(len(lost) + 1)
        for happened in itertools.combinations(lost, count)
        for order in itertools.permutations([*answered, *happened])
    )


def _explains(order: Sequence[Operation], model: Model) -> bool:
    state: State = model.initial
    latest_call = -1000
    for operation in order:
        # Nothing comes behind what was called after its answer.
        if operation.answered is not None and operation.answered < latest_call:
            return False
        latest_call = max(latest_call, operation.called)
        state = model.step(state, operation)
        if state is IMPOSSIBLE:
            return False
    return True


Memory = dict[str, Any]
Step = Callable[[random.Random, Memory, Sequence[int]], tuple[str, tuple[Any, ...], Any]]
"""An operation on a correct implementation: kind, arguments and answer, given the tokens that the
caller can know."""


def value_step(
    chance: random.Random, memory: Memory, tokens: Sequence[int]
) -> tuple[str, tuple[Any, ...], Any]:
    value = memory.get("value")
    new = b"%d" % chance.randrange(3)
    kind = chance.choice(["set", "get", "compare_set", "add", "append", "delete", "check"])
    if kind == "get" and value is None:
        kind = "check"
    if kind in ("set", "append"):
        memory["value"] = new if kind == "set" else (value or b"") + new
        return kind, (new,), None
    if kind == "compare_set":
        expected = chance.choice([b"", b"0", b"1", b"2"])
        if expected == value or (expected == b"" and value is None):
            memory["value"] = new
        return kind, (expected, new), memory.get("value", expected)
    if kind == "add":
        memory["value"] = b"%d" % (int(value or 0) + 1)
        return kind, (1,), int(memory["value"])
    if kind == "delete":
        memory.pop("value", None)
    return kind, (), value if kind == "get" else value is not None


def queue_step(
    chance: random.Random, memory: Memory, tokens: Sequence[int]
) -> tuple[str, tuple[Any, ...], Any]:
    waiting = memory.get("waiting", ())
    kind = chance.choice(["push", "push", "pop", "len"])
    if kind == "push":
        value = b"%d" % chance.randrange(3)
        memory["waiting"] = (*waiting, value)
        return kind, (value,), None
    if kind == "len":
        return kind, (), len(waiting)
    memory["waiting"] = waiting[1:]
    return kind, (), waiting[0] if waiting else None


def document_step(
    chance: random.Random, memory: Memory, tokens: Sequence[int]
) -> tuple[str, tuple[Any, ...], Any]:
    version = memory.get("version", 0)
    now = (memory["document"], version) if version else None
    if chance.random() < 0.4:
        return "get_state", (), now
    given = chance.choice([None, *tokens[-2:]])
    new = b"%d" % chance.randrange(3)
    if given == (version or None):
        memory.update(document=new, version=version + 1)
        return "set_state", (new, given), (new, version + 1, True)
    return "set_state", (new, given), now and (*now, False)


def random_history(
    chance: random.Random, step: Step, size: int, overlap: int, lost_share: float
) -> list[Operation]:
    """What clients of a correct implementation see: each operation has its moment, and lasts from
    some time before it to some time after it. Some answers get lost, with or without effect."""
    memory: Memory = {}
    operations: list[Operation] = []
    for number in range(size):
        lost = chance.random() < lost_share
        called = 10 * number - chance.randrange(1, overlap)
        tokens = (
            [
                each.answer[1]
                for each in operations
                if each.answered is not None and each.answered < called and each.answer
            ]
            if step is document_step
            else []
        )
        after = dict(memory)
        kind, arguments, answer = step(chance, after, tokens)
        if not lost or chance.random() < 0.5:
            memory = after
        answered = None if lost else 10 * number + chance.randrange(1, overlap)
        answer = UNKNOWN if lost else answer
        operations.append(
            Operation(f"client {number}", kind, "k", arguments, answer, called, answered)
        )
    chance.shuffle(operations)
    return operations


CASES = [
    pytest.param(Value, value_step, id="value"),
    pytest.param(Queue, queue_step, id="queue"),
    pytest.param(Document, document_step, id="document"),
]


@pytest.mark.parametrize(("model", "step"), CASES)
def test_what_a_correct_implementation_does_is_accepted(
    model: Callable[[], Model], step: Step
) -> None:
    for seed in range(60):
        history = random_history(random.Random(seed), step, 40, overlap=25, lost_share=0.1)
        assert check(history, model()) is None, seed


def mutated(chance: random.Random, history: Sequence[Operation]) -> list[Operation]:
    """The history with one answer or one time changed."""
    changed = list(history)
    index = chance.randrange(len(history))
    operation = history[index]
    same_kind = [each for each in history if each.kind == operation.kind and each.known]
    if operation.known and same_kind and chance.random() < 0.5:
        changed[index] = replace(operation, answer=chance.choice(same_kind).answer)
    elif operation.answered is not None:
        sooner = max(operation.called, operation.answered - chance.randrange(1, 30))
        changed[index] = replace(operation, answered=sooner)
    return changed


@pytest.mark.parametrize(("model", "step"), CASES)
def test_small_histories_are_judged_as_all_orders_judge_them(
    model: Callable[[], Model], step: Step
) -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(2000):
        chance = random.Random(seed)
        history = random_history(chance, step, 5, overlap=12, lost_share=0.2)
        for _ in range(4):
            history = mutated(chance, history)
        right = by_trying_all_orders(history, model())
        verdicts[right] += 1
        problem = check(history, model())
        assert (problem is None) is right, (seed, problem or history)
    # Both verdicts are tried in earnest.
    assert min(verdicts.values()) > 150, verdicts


def test_a_wrong_count_in_a_long_history_is_found() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        history = []
        for number in range(200):
            called, answered = 10 * number - chance.randrange(60), 10 * number + 5
            history.append(Operation(f"{number}", "add", "k", (1,), number + 1, called, answered))
        assert check(history, Value()) is None
        index = chance.randrange(200)
        history[index] = replace(history[index], answer=history[index].answer + 1)
        assert f"-> {history[index].answer} " in (check(history, Value()) or "")
