"""More planted faults: the mistakes that the simulation has found in this code. They must be caught
again. See :mod:`sim.faults`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from sim import agent
from sim.planting import always, fault

from rdzv import effects, machine, protocol, steps
from rdzv.effects import Found, Session, Wait
from rdzv.state import State


@fault
def refill_is_not_noticed() -> Any:
    """A document that another node has put back is one like any other."""
    take = steps.take

    def careless(session: Session, found: Found) -> None:
        session.refill = session.refill if found.state is None else found.state.refill
        take(session, found)

    return patch.object(steps, "take", careless)


@fault
def newcomers_count_at_once() -> Any:
    """Whoever has arrived is a candidate, and may form the round."""
    both = contextlib.ExitStack()
    for module in (machine, protocol):
        both.enter_context(patch.object(module, "has_settled", always(True)))
    return both


@fault
def silence_is_not_noticed() -> Any:
    """Contact is unbroken as long as the own entry could have survived the silence."""
    return patch.object(effects, "SILENCE_INTERVALS", 3.0)


@fault
def entry_is_not_announced_again() -> Any:
    """What an entry said before the backend was lost is taken to stand."""
    lose_contact = Session.lose_contact

    def forget(session: Session) -> None:
        known = session.announced
        lose_contact(session)
        session.announced = known

    return patch.object(Session, "lose_contact", forget)


@fault
def round_that_came_back_is_not_left() -> Any:
    """A waiting node does not say that it has left the round which the document has again."""
    decide = machine.decide_waiting

    def decide_waiting(state: State | None, listing: Any, rules: Any, me: Any, now: float) -> Any:
        decision = decide(state, listing, rules, me, now)
        if decision.act is not machine.Act.LEAVE or state is None:
            return decision
        others = tuple(node for node in state.participants if node.id != me.id)
        blind = decide(replace(state, participants=others), listing, rules, me, now)
        stays = blind.act not in (machine.Act.SWAP, machine.Act.CONFIRM)
        return blind if stays else machine.Decision(machine.Act.WAIT, "for itself")

    return patch.object(protocol, "decide_waiting", decide_waiting)


@fault
def who_gives_up_is_still_a_member() -> Any:
    """A joiner that times out just when its round is complete closes the run."""
    give_up = protocol.give_up

    def careless(session: Session) -> Any:
        running = session.entry.running
        try:
            yield from give_up(session)
        finally:
            session.entry = replace(session.entry, running=running)

    return patch.object(agent, "give_up", careless)


@fault
def bygone_nodes_are_admitted() -> Any:
    """A node of the job before enters the next one under the same run id."""
    never = always(False)
    return _both(
        patch.object(machine, "is_bygone", never), patch.object(protocol, "is_bygone", never)
    )


@fault
def older_incarnation_expels() -> Any:
    """A document of the incarnation before is taken for a later one."""
    restored = machine.restored

    def restore(state: State | None, mine: State | None, refill: str) -> State | None:
        if state is not None and mine is not None and state.incarnation in mine.replaces:
            return None
        return restored(state, mine, refill)

    return patch.object(steps, "restored", restore)


@fault
def early_end_of_a_wait_is_ignored() -> Any:
    """A wait that ended without a document is begun again, though the backend was emptied."""

    def wait(session: Session, decision: Any) -> Any:
        session.why = decision.why
        moments = [session.next_beat, session.deadline, decision.wake_at_seconds]
        until = min(moment for moment in moments if moment is not None)
        seconds = max(0.0, until - session.clock())
        found = yield Wait(session.token, None, seconds, decision.why)
        if found is not None:
            steps.take(session, found)

    return patch.object(protocol, "_wait", wait)


@contextlib.contextmanager
def _both(*plants: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield
