"""How faults are planted: the list of all of them, and what those who plant one need.

A fault is a context manager that patches the product, never the simulation. Modules enter theirs
into the list with :func:`fault` when they are imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}
"""Every fault by its name."""

Fault = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """While inside, the product has that fault; "" plants none."""
    with FAULTS[name]() if name else contextlib.nullcontext():
        yield


def fault(plant: Fault) -> Fault:
    """Enter a fault into the list under its function's name."""
    FAULTS[plant.__name__.replace("_", "-")] = plant
    return plant


def always(value: Any) -> Callable[..., Any]:
    """A function that returns this, whatever it is given."""
    return lambda *_, **__: value
