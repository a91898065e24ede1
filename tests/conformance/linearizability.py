"""Whether what concurrent clients saw has one explanation: a linearizability checker.

A history is a set of operations, each with the time of its call and the time of its answer. It is
linearizable if every operation can be given one moment between the two at which it took effect as
a whole, so that a sequential model, fed in the order of those moments, gives the very answers that
were seen. That is what "atomic" means to somebody who holds only the answers.

Rules:

* All times are of one clock. ``time.monotonic_ns()`` is one for all processes of a machine.
* An operation whose outcome is unknown (an error, a lost answer, a killed client, a call that has
  not returned) has no answer and no end: it may have taken effect at any time after its call, even
  after all others, or never. It costs certainty but never gives a false alarm.
* Keys are checked one by one. A history is linearizable exactly if its part for each key is
  (Herlihy and Wing, 1990), so this loses nothing and is far cheaper.
* Tokens come out of recorded answers: a history in which somebody uses a token that no answer
  in it has shown is not complete.

The search is the one of Wing and Gong (1993) with the memory of Lowe (2017). A configuration is
the set of operations that have had their moment, and the state of the model then. The next moment
can belong to every operation that was called before the first answer still to come. Try each whose
answer the model gives; when all answered operations have had their moment, the history is
linearizable. Shortcuts, none of which changes the result:

* A read that fits is taken at once, without a branch: in any order that succeeds from here it can
  be moved to the front. It must be one that with this answer changes no state whatever; a write
  that only happens to change nothing here may be needed later.
* Of operations with an unknown outcome and the same content, the one that was called first is tried
  first, as good as any; and none is tried where it would change nothing.
* A configuration is given up if one was tried before with the same answered operations, the same
  state, and no unknown operation spent that is not spent here too: whatever succeeds from here
  succeeds from there.
* A model may rule out states from which the answers still to come cannot be had (``learn``).
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

STEPS_MAX = 200_000
"""So many configurations are tried for one key; it takes a few seconds."""
SHOWN_OPERATIONS_MAX = 12


class _Mark(enum.Enum):
    UNKNOWN = "unknown"
    IMPOSSIBLE = "impossible"


UNKNOWN = _Mark.UNKNOWN
"""In the place of an answer: nobody knows it."""
IMPOSSIBLE = _Mark.IMPOSSIBLE
"""In the place of a state: the model does not give this answer."""


class HistoryTooLargeError(Exception):
    """The history has too many possible orders to try them all. Record fewer operations, or let
    clients read more often what they write."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, as its caller saw it."""

    client: str
    """Who called, for people."""
    kind: str
    key: str
    arguments: tuple[Any, ...]
    answer: Any
    """``UNKNOWN`` where ``answered`` is None."""
    called: int
    """Nanoseconds, taken before the call."""
    answered: int | None
    """Nanoseconds, taken after the answer; None where the outcome is unknown."""
    error: str = ""
    """Why the outcome is unknown, for people."""

    @property
    def known(self) -> bool:
        """Whether there is an answer that the order must explain."""
        return self.answered is not None


State: TypeAlias = Hashable
Path: TypeAlias = "tuple[Path | None, int, State]"
"""What came before, an operation's index, and the state after it."""


class Model(ABC):
    """What one key does when it is used by one client at a time."""

    initial: State = None

    def learn(self, operations: Sequence[Operation]) -> None:  # noqa: B027 - most need not
        """Look at all operations before a search among them, to rule out states from which it
        could not succeed."""

    @abstractmethod
    def step(self, state: State, operation: Operation) -> State:
        """The state after the operation, or ``IMPOSSIBLE`` where its answer is not the one that
        this state gives. An operation of unknown outcome has every answer. Raises ``ValueError``
        for a kind that the model does not know."""

    def is_read(self, operation: Operation) -> bool:
        """Whether this operation with this answer changes the state nowhere (but for what the
        model learns by it). To say so makes the search shorter, to be wrong makes it wrong."""
        return False

    def shown(self, state: State) -> str:
        """The state for people."""
        return _short(state)


def check(history: Iterable[Operation], model: Model, steps_max: int = STEPS_MAX) -> str | None:
    """None if the history is linearizable, key by key, else an explanation.

    Raises :class:`HistoryTooLargeError` where the search takes more than ``steps_max`` steps.
    """
    by_key: dict[str, list[Operation]] = {}
    for operation in sorted(history, key=lambda each: each.called):
        by_key.setdefault(operation.key, []).append(operation)
    problems = [
        _explained(operations, model, steps_max)
        for operations in by_key.values()
        if _order(operations, model, steps_max) is None
    ]
    return "\n\n".join(problems) or None


def _order(
    operations: Sequence[Operation], model: Model, steps_max: int
) -> list[tuple[Operation, State]] | None:
    """An order that explains all answers, with the state after each operation; None if there is
    none. The operations are sorted by the time of their call. Sets of them are bits of a number."""
    model.learn(operations)
    known = sum(1 << index for index, operation in enumerate(operations) if operation.known)
    tried: dict[tuple[int, State], list[int]] = {}
    # First comes what has explained most answers with the fewest unknown operations, so that few
    # configurations are tried before one that makes them needless; among equals the latest, which
    # makes it a search in depth.
    heap: list[tuple[int, int, int, State, Path | None]] = [(0, 0, 0, model.initial, None)]
    pushed = steps = 0
    while heap:
        *_, done, state, path = heapq.heappop(heap)
        if done & known == known:
            return _unrolled(operations, path)
        spent = done & ~known
        others = tried.setdefault((done & known, state), [])
        steps += 1 + len(others) // 32
        if steps > steps_max:
            raise HistoryTooLargeError(
                f"{len(operations)} operations on {operations[0].key!r} have too many possible "
                f"orders: none of those tried in {steps_max} steps explains the answers"
            )
        if any(other & spent == other for other in others):
            continue
        others.append(spent)
        for index, after in _branches(operations, done, state, model):
            pushed += 1
            now_done = done | 1 << index
            cost = (now_done & ~known).bit_count() - (now_done & known).bit_count()
            heapq.heappush(heap, (cost, -pushed, now_done, after, (path, index, after)))
    return None


def _unrolled(operations: Sequence[Operation], path: Path | None) -> list[tuple[Operation, State]]:
    order = []
    while path is not None:
        path, index, state = path
        order.append((operations[index], state))
    return order[::-1]


def _branches(
    operations: Sequence[Operation], done: int, state: State, model: Model
) -> list[tuple[int, State]]:
    """What can have the next moment, with the state after it; the likeliest last."""
    answered: list[tuple[int, State]] = []
    unknown: list[tuple[int, State]] = []
    for index in _open(operations, done):
        operation = operations[index]
        after = model.step(state, operation)
        if after is IMPOSSIBLE:
            continue
        if operation.known:
            if after == state and model.is_read(operation):
                return [(index, state)]
            answered.append((index, after))
        elif after != state and not any(
            operations[other].kind == operation.kind
            and operations[other].arguments == operation.arguments
            for other, _ in unknown
        ):
            unknown.append((index, after))
    answered.sort(key=lambda branch: operations[branch[0]].answered or 0, reverse=True)
    return unknown[::-1] + answered


def _open(operations: Sequence[Operation], done: int) -> Iterator[int]:
    """Operations without a moment that were called before the first answer still to come. Calls at
    the very time of an answer count as before it: the clock has a resolution."""
    deadline: int | None = None
    lowest_not_done = (~done & (done + 1)).bit_length() - 1
    for index in range(lowest_not_done, len(operations)):
        if done >> index & 1:
            continue
        operation = operations[index]
        if deadline is not None and operation.called > deadline:
            return
        yield index
        if operation.answered is not None and (deadline is None or operation.answered < deadline):
            deadline = operation.answered


# The explanation


def _explained(operations: Sequence[Operation], model: Model, steps_max: int) -> str:
    """Where a history that has no order goes wrong: with its first answer that cannot be."""
    answered = sorted(
        (operation for operation in operations if operation.answered is not None),
        key=lambda operation: operation.answered or 0,
    )
    # A part of a linearizable history up to some moment is linearizable, so bisection finds the
    # shortest part that is not.
    good, bad = 0, len(answered)
    before: list[tuple[Operation, State]] = []
    while bad - good > 1:
        middle = (good + bad) // 2
        order = _order(_until(operations, answered[middle - 1]), model, steps_max)
        if order is None:
            bad = middle
        else:
            good, before = middle, order
    culprit = answered[bad - 1]
    start = operations[0].called
    others = [
        operation
        for operation in operations
        if operation is not culprit
        and operation.called <= (culprit.answered or 0)
        and (operation.answered is None or operation.answered >= culprit.called)
    ]
    lines = [
        f"not linearizable: key {culprit.key!r}, answer {bad} of {len(answered)}; no order of the "
        "operations explains",
        f"  {_line(culprit, start)}",
        "under way at the same time, or with an unknown outcome:",
        *(f"  {_line(operation, start)}" for operation in others[-SHOWN_OPERATIONS_MAX:]),
        *([] if others else ["  nothing"]),
        "one order that explains all earlier answers ends with:",
        *(
            f"  {_line(operation, start)}  and then the state is {model.shown(state)}"
            for operation, state in before[-SHOWN_OPERATIONS_MAX:]
        ),
        *([] if before else [f"  nothing: the state is {model.shown(model.initial)}"]),
    ]
    return "\n".join(lines)


def _until(operations: Sequence[Operation], last: Operation) -> list[Operation]:
    """The history as it was known when the operation ``last`` had just been answered."""
    now = last.answered or 0
    return [
        operation
        if operation.answered is None or operation.answered <= now
        else replace(operation, answer=UNKNOWN, answered=None)
        for operation in operations
        if operation.called <= now
    ]


def _line(operation: Operation, start: int) -> str:
    arguments = ", ".join(map(_short, operation.arguments))
    called = f"{(operation.called - start) / 1e6:.3f}"
    if operation.answered is None:
        outcome, answered = operation.error or "no answer", "?"
    else:
        outcome, answered = _short(operation.answer), f"{(operation.answered - start) / 1e6:.3f}"
    return (
        f"{operation.kind}({arguments}) -> {outcome}   [{operation.client}, "
        f"{called} to {answered} ms]"
    )


_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 60


def _short(value: object) -> str:
    # reprlib shortens strings but takes bytes for something else, and counts their repr.
    return _shortener.repr(value)


# The models


class Document(Model):
    """A document that is replaced by compare-and-set: ``get_state() -> (document, token) | None``
    and ``set_state(document, token | None) -> (document, token, success) | None``.

    Tokens are opaque, so the model cannot foretell them. It learns the token of a version from the
    first answer that shows it, and holds all later ones to it: one token, one version, for ever.
    """

    initial: State = (None, 0, 0)
    """The document; the number of its token, 0 for one that nobody has seen yet; and, as bits, the
    numbers of all tokens seen so far."""

    def __init__(self) -> None:
        self._tokens: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def step(self, state: State, operation: Operation) -> State:
        match operation.kind:
            case "get_state":
                return self._seen(state, operation.answer)
            case "set_state":
                return self._set(state, operation)
        raise ValueError(f"a document knows no {operation.kind!r}")

    def is_read(self, operation: Operation) -> bool:
        answer = operation.answer
        return operation.kind == "get_state" or answer is None or not answer[2]

    def shown(self, state: Any) -> str:
        document, number, _ = state
        token = self._tokens[number - 1] if number else "not seen yet"
        return f"{_short(document)} with token {_short(token)}"

    def _seen(self, state: Any, answer: Any) -> State:
        """The state after an answer that shows it."""
        document, number, used = state
        if answer is UNKNOWN:
            return state  # type: ignore[no-any-return]
        if document is None or answer is None:
            return state if document is None and answer is None else IMPOSSIBLE
        seen, token = answer
        shown = self._number(token)
        if seen != document or (shown != number if number else used >> shown & 1):
            return IMPOSSIBLE
        return (document, shown, used | 1 << shown)

    def _set(self, state: Any, operation: Operation) -> State:
        document, number, used = state
        written, given = operation.arguments
        # A version whose token nobody has seen is not replaced by anybody who names a token.
        fits = document is None if given is None else self._number(given) == number
        answer = operation.answer
        if answer is UNKNOWN:
            return (written, 0, used) if fits else state
        success = answer is not None and answer[2]
        if not fits:
            return IMPOSSIBLE if success else self._seen(state, answer and answer[:2])
        if not success or answer[0] != written:
            return IMPOSSIBLE
        return self._seen((written, 0, used), answer[:2])

    def _number(self, token: Any) -> int:
        """A number from 1 for each token, by nothing but its equality."""
        try:
            number = self._numbers.get(token)
        except TypeError:
            number = None
        if number is None:
            if token not in self._tokens:
                self._tokens.append(token)
            number = self._tokens.index(token) + 1
            with contextlib.suppress(TypeError):
                self._numbers[token] = number
        return number


class Value(Model):
    """One key of a store, as register, counter and text at once: ``set(value) -> None``,
    ``get() -> bytes``, ``compare_set(expected, desired) -> bytes``, ``add(amount) -> int``,
    ``append(value) -> None``, ``delete() -> bool`` and ``check() -> bool``.

    A ``get`` waits for a value, so it has no answer without one. A ``compare_set`` answers with the
    value after it, and with what it expected where there is none.

    An append has no answer that would tell its place, so orders of appends would multiply until
    the next ``get``. Where there are only appends, every text is the beginning of every later one.
    """

    initial: State = None

    def __init__(self) -> None:
        self._longest_text = b""

    def learn(self, operations: Sequence[Operation]) -> None:
        self._longest_text = b""
        if {operation.kind for operation in operations} <= {"append", "get", "check"}:
            texts = [each.answer for each in operations if each.kind == "get" and each.known]
            self._longest_text = max(texts, key=len, default=b"")

    def step(self, state: State, operation: Operation) -> State:
        after, answer = self._applied(state, operation.kind, operation.arguments)
        return after if operation.answer is UNKNOWN or operation.answer == answer else IMPOSSIBLE

    def is_read(self, operation: Operation) -> bool:
        match operation.kind:
            case "get" | "check":
                return True
            case "compare_set":
                return bool(operation.answer != operation.arguments[1])
            case "delete":
                return operation.answer is False
        return False

    def _applied(self, state: Any, kind: str, arguments: tuple[Any, ...]) -> tuple[State, Any]:
        match kind, arguments:
            case "set", (value,):
                return value, None
            case "get", ():
                return state, IMPOSSIBLE if state is None else state
            case "compare_set", (expected, desired):
                if state == expected or (state is None and expected == b""):
                    return desired, desired
                return state, expected if state is None else state
            case "add", (amount,):
                try:
                    total = int(state or 0) + amount
                except ValueError:
                    return state, IMPOSSIBLE
                return str(total).encode(), total
            case "append", (value,):
                text, known = (state or b"") + value, self._longest_text
                can_be = text[: len(known)] == known[: len(text)]
                return (text, None) if can_be else (state, IMPOSSIBLE)
            case "delete", ():
                return None, state is not None
            case "check", ():
                return state, state is not None
        raise ValueError(f"a value knows no {kind!r} with {len(arguments)} arguments")


class Queue(Model):
    """A queue: ``push(value) -> None``, ``pop() -> bytes``, or None from an empty one, and
    ``len() -> int``."""

    initial: State = ()

    def __init__(self) -> None:
        self._pops: dict[Any, Operation] = {}
        self._some_pop_is_unknown = False

    def learn(self, operations: Sequence[Operation]) -> None:
        """Which pop took which value: it tells at a push already what would show much later."""
        pushed = [each.arguments[0] for each in operations if each.kind == "push"]
        pops = [each for each in operations if each.kind == "pop"]
        self._some_pop_is_unknown = any(not pop.known for pop in pops)
        # Values that are pushed twice cannot be told apart: then nothing is ruled out.
        unique = len(pushed) == len(set(pushed))
        self._pops = {pop.answer: pop for pop in pops if pop.known and unique}

    def step(self, state: Any, operation: Operation) -> State:
        answer = operation.answer
        match operation.kind, operation.arguments:
            case "push", (value,):
                if answer not in (UNKNOWN, None) or not self._may_follow(value, state):
                    return IMPOSSIBLE
                return (*state, value)
            case "pop", ():
                first = state[0] if state else None
                if answer is UNKNOWN:
                    # What another pop has answered with is not what this one took.
                    return IMPOSSIBLE if first in self._pops else state[1:]
                return state[1:] if answer == first else IMPOSSIBLE
            case "len", ():
                fits = answer is UNKNOWN or answer == len(state)
                return state if fits else IMPOSSIBLE
        raise ValueError(f"a queue knows no {operation.kind!r}")

    def _may_follow(self, value: Any, ahead: Sequence[Any]) -> bool:
        """Whether the value can come out after all that are ahead of it."""
        pop = self._pops.get(value)
        if pop is None or pop.answered is None:
            return True
        for other in ahead:
            first = self._pops.get(other)
            if first is None:
                if not self._some_pop_is_unknown:
                    return False
            elif pop.answered < first.called:
                return False
        return True

    def is_read(self, operation: Operation) -> bool:
        return operation.kind == "len" or (operation.kind == "pop" and operation.answer is None)
