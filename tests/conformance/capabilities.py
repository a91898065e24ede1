"""Capabilities: what a backend or a store can do, as named questions with a documented answer.

A target answers yes to every question unless ``Target.without`` names it with a reason. A required
one cannot be answered with no. A clause of a capability that is there must hold; one of a
capability that is not is tried all the same, and if it holds the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """A question about a target."""

    name: str
    question: str
    required: bool = False


CAPABILITIES = {
    one.name: one
    for one in (
        Capability(
            "compare_and_set",
            "Does a write succeed only if it names the token of the document that it replaces?",
            required=True,
        ),
        Capability(
            "any_bytes", "Does a document come back byte for byte, up to 1 MB?", required=True
        ),
        Capability(
            "isolated_runs", "Is what one run id writes invisible to every other?", required=True
        ),
        Capability(
            "roster",
            "Does it keep an entry for each node that expires by the backend's clock "
            "(rdzv.ports.Roster)? Without, rdzv keeps the nodes inside the document: up to 32.",
        ),
        Capability(
            "watch",
            "Can a node wait for a change (rdzv.ports.Watch)? Without, rdzv asks again and again.",
        ),
        Capability(
            "server_clock",
            "Does a pulse tell the age of the document, and the time to the next expiry, by the "
            "backend's clock? Without, agents act on a change within a keep-alive interval.",
        ),
        Capability("store", "Does it come with a torch.distributed.Store?"),
        Capability("multi", "Has the store append, multi_get and multi_set (has_extended_api)?"),
        Capability("queues", "Has the store queue_push, queue_pop and queue_len?"),
        Capability("list_keys", "Has the store list_keys?"),
        Capability("clone", "Is a clone of the store an object of its own, with its own timeout?"),
        Capability(
            "large_values", "Does the store take values of 4 MB, as torch writes for subgroups?"
        ),
        Capability(
            "durable", "Is what was acknowledged there after the server was killed and restarted?"
        ),
        Capability("processes", "Do several processes meet on it?"),
    )
}


def problems_of(without: Mapping[str, str]) -> list[str]:
    """What is wrong with a target's answers, in sentences.

    >>> problems_of({"watch": "it cannot push"})
    []
    >>> problems_of({"compare_and_set": "later", "roster": " ", "wings": "none"})[0]
    "'compare_and_set' is required and cannot be switched off: a training job relies on it"
    """
    problems = []
    for name, reason in without.items():
        if name not in CAPABILITIES:
            known = ", ".join(sorted(CAPABILITIES))
            problems.append(f"{name!r} is no capability; there are: {known}")
        elif CAPABILITIES[name].required:
            problems.append(
                f"{name!r} is required and cannot be switched off: a training job relies on it"
            )
        elif not reason.strip():
            problems.append(f"{name!r} is switched off without a reason")
    return problems
