"""What torch asks of a Store, as cases that run on any store.

A case is a function of one argument, ``connect``: each call of it gives another client of the same
data, which is empty when the case begins. A store joins by handing over such a function for every
case in ``CASES``; where it differs on purpose it declares the case as an expected failure, with
the reason. The reference is what torch's HashStore and TCPStore do; the project's own tests run
the same cases on those, and show where they differ, from each other too.

>>> import torch.distributed as dist
>>> store = dist.HashStore()
>>> next(case for case in CASES if case.__name__ == "add_counts")(lambda: store)
"""

from __future__ import annotations

# Importing the modules fills the list.
from rdzv.conformance import store_value_cases, store_wait_cases
from rdzv.conformance.store_kit import CASES, Case, Connect

__all__ = ["CASES", "Case", "Connect", "store_value_cases", "store_wait_cases"]
