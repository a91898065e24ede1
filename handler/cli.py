"""The command ``rdzv``: what an engineer asks when a job hangs or a backend is in doubt.

``rdzv backends`` lists the names for ``--rdzv-backend``, ``rdzv check`` tries a backend with a
throw-away run, ``rdzv state`` shows what a run has stored, and changes nothing. Options may be
spelled as torchrun spells them, and mean the same.

Exit status: 0 for yes, 1 for no (something failed, nothing is stored), 2 for a wrong command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import rdzv
from rdzv.errors import RendezvousError, RendezvousSettingsError, RendezvousStateError, mask_secrets
from rdzv.ports import (
    Closable,
    Entry,
    GetsReady,
    Listed,
    Located,
    Question,
    Roster,
    Token,
    Watch,
)

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    from rdzv.state import RosterEntry, State

SAMPLES = 20
"""Of every call that ``rdzv check`` measures."""
CHECK_LIFETIME_SECONDS = 60
"""How long the throw-away run may stay in the backend."""
CHECK_TTL_SECONDS = 10.0
WAKE_UP_TIMEOUT_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except RendezvousSettingsError as error:
        print(f"rdzv: {mask_secrets(str(error))}", file=sys.stderr)
        return 2
    except (RendezvousError, RuntimeError, OSError) as error:
        # RuntimeError: what torch's stores raise.
        print(f"rdzv: {type(error).__name__}: {mask_secrets(str(error))}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rdzv", description="Look at the rendezvous of torchrun jobs."
    )
    parser.add_argument("--version", action="version", version=f"rdzv {rdzv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="backends|check|state")

    backends = commands.add_parser("backends", help="list the names for --rdzv-backend")
    backends.set_defaults(command=_backends)

    check = commands.add_parser(
        "check", help="try a backend: what it can do, and how fast", description=_check.__doc__
    )
    check.set_defaults(command=_check)

    state = commands.add_parser(
        "state", help="show what a run has stored", description=_state.__doc__
    )
    state.set_defaults(command=_state)
    state.add_argument("--run-id", "--rdzv-id", required=True, help="of the job")
    for command in (check, state):
        command.add_argument(
            "--backend", "--rdzv-backend", required=True, help="a name that `rdzv backends` lists"
        )
        command.add_argument(
            "--endpoint", "--rdzv-endpoint", default="", help="as for torchrun; or env:NAME"
        )
        command.add_argument(
            "--conf", "--rdzv-conf", default="", metavar="NAME=VALUE,...", help="more options"
        )
    for command in (backends, check, state):
        command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _backends(options: argparse.Namespace) -> int:
    from rdzv.registry import known_backends

    rows: list[dict[str, Any]] = [
        {
            "name": known.name,
            "registered": bool(known.factory),
            "endpoint": known.endpoint,
            "extras": known.extras,
        }
        for known in known_backends()
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["endpoint"]) for row in rows)
    for row in rows:
        extras = " or ".join(f"rdzv[{extra}]" for extra in row["extras"])
        missing = "" if row["registered"] else "NOT REGISTERED: install rdzv again"
        print(f"{row['name']:<12} {row['endpoint']:<{width}} {extras} {missing}".rstrip())
    return 0


def _parameters(options: argparse.Namespace, run_id: str, **more: str) -> RendezvousParameters:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    configuration: dict[str, str] = dict(more)
    for pair in filter(None, options.conf.split(",")):
        name, separator, value = pair.partition("=")
        if not (separator and name.strip() and value.strip()):
            raise RendezvousSettingsError(f"--conf: {mask_secrets(pair)!r} is not NAME=VALUE.")
        configuration[name.strip()] = value.strip()
    try:
        return RendezvousParameters(
            options.backend, options.endpoint, run_id, 1, 1, **configuration
        )
    except (TypeError, ValueError) as error:
        raise RendezvousSettingsError(f"These parameters cannot work: {error}") from error


def _close(*opened: object) -> None:
    for one in opened:
        if isinstance(one, Closable):
            one.close()


def _endpoint_of(backend: RendezvousBackend, options: argparse.Namespace) -> str:
    return backend.endpoint if isinstance(backend, Located) else mask_secrets(options.endpoint)


# rdzv check


@dataclass(slots=True)
class _Check:
    """What was tried, in order. A step's function raises, or returns what else there is to say."""

    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(step["ok"] for step in self.steps)

    def step(self, name: str, call: Callable[[], str | None], times: int = 1) -> None:
        milliseconds: list[float] = []
        note, ok = None, True
        try:
            for _ in range(times):
                began = time.perf_counter()
                note = call()
                milliseconds.append((time.perf_counter() - began) * 1000)
        except RendezvousSettingsError:
            raise
        except (RendezvousError, RuntimeError, OSError) as error:
            note, ok = f"{type(error).__name__}: {mask_secrets(str(error))}", False
        self.steps.append(
            {
                "step": name,
                "ok": ok,
                "calls": len(milliseconds),
                "median_milliseconds": _rounded(statistics.median, milliseconds),
                "max_milliseconds": _rounded(max, milliseconds),
                "note": note or "",
            }
        )

    def absent(self, name: str) -> None:
        self.steps.append({"step": name, "ok": True, "calls": 0, "note": "not there; made up for"})


def _rounded(measure: Callable[[list[float]], float], values: list[float]) -> float | None:
    return round(measure(values), 3) if values else None


def _check(options: argparse.Namespace) -> int:
    """Open the backend and try all of its abilities with a throw-away run id."""
    from rdzv.registry import open_backend

    params = _parameters(
        options,
        f"rdzv-check-{uuid.uuid4().hex}",
        outage_timeout=str(CHECK_LIFETIME_SECONDS),
        closed_grace="1",
    )
    check = _Check()
    opened: list[Any] = []

    def open_as_a_node() -> None:
        backend, store = open_backend(params)
        try:
            if isinstance(backend, GetsReady):
                backend.get_ready()
        except BaseException:
            _close(backend, store)
            raise
        opened.extend((backend, store))

    check.step("open", open_as_a_node)
    if not opened:
        _print_check(check, mask_secrets(options.endpoint), options)
        return 1
    backend, store = opened
    try:
        _try_state(check, backend)
        _try_roster(check, backend)
        _try_watch(check, backend)
        _try_store(check, store)
        _print_check(check, _endpoint_of(backend, options), options)
    finally:
        _close(backend, store)
    return 0 if check.ok else 1


def _try_state(check: _Check, backend: RendezvousBackend) -> None:
    tokens: list[Token] = [None]

    def write() -> None:
        answer = backend.set_state(b"rdzv check", tokens[-1])
        if answer is None or not answer[2]:
            raise RendezvousStateError("a write with the right token was refused")
        tokens.append(answer[1])

    def read() -> None:
        answer = backend.get_state()
        if answer is None or bytes(answer[0]) != b"rdzv check" or answer[1] != tokens[-1]:
            raise RendezvousStateError("what was written was not read back")

    def write_late() -> None:
        answer = backend.set_state(b"rdzv check, late", tokens[1])
        if answer is not None and answer[2]:
            raise RendezvousStateError("a write with an old token was not refused")

    check.step("create state", write)
    if len(tokens) == 1:
        return
    check.step("get_state", read, SAMPLES)
    check.step("set_state", write, SAMPLES)
    check.step("refuse an old token", write_late)


def _try_roster(check: _Check, backend: RendezvousBackend) -> None:
    if not isinstance(backend, Roster):
        check.absent("roster")
        check.absent("clock")
        return
    roster, ask = backend, Question()
    entry = Entry(f"check_{uuid.uuid4().hex[:12]}", b"rdzv check")

    def beat() -> None:
        if not roster.beat(entry.node_id, CHECK_TTL_SECONDS, ask).present:
            raise RendezvousStateError("an entry that was just announced is gone")

    def tell_age() -> str:
        age = roster.beat(entry.node_id, CHECK_TTL_SECONDS, ask).state_age_seconds
        return "no age of the state; made up for" if age is None else f"state is {age:.3f} s old"

    def look() -> str:
        names = [row.entry.node_id for row in roster.entries() if not row.withdrawn]
        if names != [entry.node_id]:
            raise RendezvousStateError("the listing does not hold the one entry announced")
        return ""

    def announce() -> None:
        roster.announce(entry, CHECK_TTL_SECONDS, ask)

    check.step("roster: announce", announce)
    check.step("roster: beat", beat, SAMPLES)
    check.step("roster: entries", look, SAMPLES)
    check.step("clock", tell_age)
    check.step("roster: withdraw", lambda: roster.withdraw(entry.node_id, CHECK_TTL_SECONDS))


def _try_watch(check: _Check, backend: RendezvousBackend) -> None:
    if not isinstance(backend, Watch):
        check.absent("watch")
        return
    watch = backend

    def wake() -> str:
        found = backend.get_state()
        token = found[1] if found else None
        woken: list[float] = []

        def wait() -> None:
            if watch.wait_for_change(token, WAKE_UP_TIMEOUT_SECONDS) is not None:
                woken.append(time.perf_counter())

        waiter = threading.Thread(target=wait, name="rdzv-check", daemon=True)
        waiter.start()
        # Long enough for the waiter to be asleep, so that its awakening is measured.
        waiter.join(0.2)
        backend.set_state(b"rdzv check, watched", token)
        written = time.perf_counter()
        waiter.join(WAKE_UP_TIMEOUT_SECONDS)
        if not woken:
            raise RendezvousStateError("a waiting node was not told of a change")
        return f"told {max(0.0, woken[0] - written) * 1000:.1f} ms after the write"

    check.step("watch", wake)


def _try_store(check: _Check, store: Store) -> None:
    key = f"check/{uuid.uuid4().hex}"

    def read() -> None:
        if store.get(key) != b"rdzv check":
            raise RendezvousStateError("what was stored was not read back")

    check.step("store: set", lambda: store.set(key, "rdzv check"), SAMPLES)
    check.step("store: get", read, SAMPLES)
    check.step("store: delete_key", lambda: None if store.delete_key(key) else "nothing deleted")


def _print_check(check: _Check, endpoint: str, options: argparse.Namespace) -> None:
    if options.json:
        report = {"backend": options.backend, "endpoint": endpoint, "ok": check.ok}
        print(json.dumps({**report, "steps": check.steps}, indent=2))
        return
    print(f"{options.backend} at {endpoint or 'its default endpoint'}")
    for step in check.steps:
        median, most = step.get("median_milliseconds"), step.get("max_milliseconds")
        duration = "" if median is None else f"{median:9.2f} ms"
        if step["calls"] > 1:
            duration += f"  (at most {most:.2f} of {step['calls']})"
        mark = "ok  " if step["ok"] else "FAIL"
        print(f"  {mark} {step['step']:<20} {duration:<32} {step['note']}".rstrip())
    print("It works." if check.ok else "It does not work.")


# rdzv state


@dataclass(slots=True)
class _Stored:
    """All that a run has stored, decoded as far as it can be."""

    state: State | None = None
    state_problem: str = ""
    state_age_seconds: float | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)


def _state(options: argparse.Namespace) -> int:
    """Show the document and the roster of a run. Nothing is written."""
    from rdzv.registry import open_backend

    # Whoever looks makes nothing, and is nobody's host.
    as_guest = {"create_tables": "false", "is_host": "false", "read_timeout": "10"}
    backend, store = open_backend(_parameters(options, options.run_id, **as_guest))
    try:
        stored = _read(backend)
        endpoint = _endpoint_of(backend, options)
    finally:
        _close(backend, store)
    if options.json:
        report = {"backend": options.backend, "endpoint": endpoint, "run_id": options.run_id}
        print(json.dumps({**report, **dataclasses.asdict(stored)}, indent=2))
    else:
        _print_stored(stored, options, endpoint)
    return 1 if stored.state_problem or (stored.state is None and not stored.entries) else 0


def _read(backend: RendezvousBackend) -> _Stored:
    from rdzv.adapters import FramedBackend
    from rdzv.codec import decode_state

    source = backend if isinstance(backend, Roster) else FramedBackend(backend)
    stored = _Stored()
    try:
        found = source.get_state()
        stored.state = None if found is None else decode_state(bytes(found[0]))
    except RendezvousStateError as error:
        stored.state_problem = str(error)
    # The beat of a node that was never there is a mere question.
    pulse = source.beat(f"cli_{uuid.uuid4().hex}", CHECK_TTL_SECONDS, Question())
    stored.state_age_seconds = pulse.state_age_seconds
    stored.entries = [_described(row, stored.state) for row in source.entries()]
    return stored


def _described(row: Listed, state: State | None) -> dict[str, Any]:
    from rdzv.codec import decode_entry

    described: dict[str, Any] = {"node": row.entry.node_id, "address": "", "is": "withdrawn"}
    if row.withdrawn:
        return described
    try:
        entry = decode_entry(row.entry.data)
    except RendezvousStateError as error:
        return {**described, "is": f"unreadable: {error}"}
    described |= {"address": entry.node.address, "is": _standing(entry, state)}
    described |= {"rank_hint": entry.rank_hint, "topology": entry.topology}
    return described


def _standing(entry: RosterEntry, state: State | None) -> str:
    if entry.running is None:
        return "waiting"
    if state is not None and entry.running == state.proposal_id:
        return "has confirmed the next round"
    doing = "finished" if entry.finished else "running"
    if state is not None and entry.running == state.round_id:
        return doing
    return f"{doing} in {entry.running.label}, another round"


def _print_stored(stored: _Stored, options: argparse.Namespace, endpoint: str) -> None:
    state, by_node = stored.state, {entry["node"]: entry for entry in stored.entries}
    print(f"Run {options.run_id!r} on {options.backend} at {endpoint or 'its default endpoint'}")
    if stored.state_problem:
        print(f"  The document cannot be read: {stored.state_problem}")
    elif state is None:
        print("  No document.")
    else:
        age = stored.state_age_seconds
        if age is not None:
            print(f"  Written       {age:.1f} s ago, by the backend's clock")
        print(f"  Round         {state.round}, nonce {state.nonce or '-'}")
        print(f"  Incarnation   {state.incarnation}")
        print(f"  Coordinator   {state.coordinator or '-'}")
        print(
            f"  Waiting       {state.waiting} counted for the next round; the roster has them all"
        )
        print(f"  Lost          {', '.join(state.lost) or '-'}")
        closed = (state.closed.reason or "yes") if state.closed else "no"
        well = ", and it had ended well" if state.closed and state.closed.ended_well else ""
        print(f"  Closed        {closed}{well}")
        for title, nodes in (
            ("Participants by rank", state.participants),
            ("Proposed for the next round", state.proposal.participants if state.proposal else ()),
        ):
            if nodes:
                print(f"  {title}:")
            for rank, node in enumerate(nodes):
                standing = by_node.get(node.id, {}).get("is", "absent")
                print(f"    {rank:>4}  {node.id}  {node.address}  {standing}")
    print(f"  Roster: {len(stored.entries) or 'empty'}")
    for entry in stored.entries:
        labels = [f"topology {entry['topology']}"] if entry.get("topology") else []
        labels += [f"rank hint {entry['rank_hint']}"] if entry.get("rank_hint") is not None else []
        print("    " + "  ".join([entry["node"], entry["address"] or "-", entry["is"], *labels]))


if __name__ == "__main__":
    raise SystemExit(main())
