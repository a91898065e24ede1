"""The smallest thing worth starting under torchrun: says who it is, then runs until told to stop.

With ``--collective`` it is a member of a gloo group that reduces all the time, as training does:
it dies of a peer that dies, and hangs with a peer that hangs. Without, it imports no torch and
notices nothing of its peers.

    torchrun ... -m rdzv.conformance.torchrun_worker --progress-file=FILE --stop-file=FILE

The progress file gets a JSON line for each of ``started``, ``ready`` (it is a member of its group),
``step`` and ``finished``, with the worker's place in the world.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STEP_SECONDS = 0.05
STEPS_PER_LINE = 10


@contextmanager
def collective_group() -> Iterator[Callable[[bool], bool]]:
    """Yields a function that tells whether any member of the group says True."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def any_member(mine: bool) -> bool:
        votes = torch.tensor([float(mine), 1.0])
        dist.all_reduce(votes)
        assert votes[1].item() == dist.get_world_size()
        return votes[0].item() > 0

    yield any_member
    dist.destroy_process_group()


@contextmanager
def no_group() -> Iterator[Callable[[bool], bool]]:
    """As :func:`collective_group`, of one member."""
    yield lambda mine: mine


def main() -> None:
    """Run until a file appears, or for too long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress-file", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--collective", action="store_true")
    parser.add_argument("--longest-life-seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    ends_at = time.monotonic() + arguments.longest_life_seconds
    with arguments.progress_file.open("a", buffering=1) as file:

        def report(event: str, **values: int) -> None:
            line = {
                "event": event,
                "time": time.time(),
                "pid": os.getpid(),
                "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
                "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                "rank": int(os.environ["RANK"]),
                "world_size": int(os.environ["WORLD_SIZE"]),
                **values,
            }
            file.write(json.dumps(line) + "\n")

        report("started")
        with collective_group() if arguments.collective else no_group() as any_member:
            report("ready")
            steps = 0
            while not any_member(arguments.stop_file.exists()):
                if time.monotonic() > ends_at:
                    raise SystemExit("Nobody stopped this worker in time.")
                time.sleep(STEP_SECONDS)
                steps += 1
                if steps % STEPS_PER_LINE == 0:
                    report("step", steps=steps)
        report("finished")


if __name__ == "__main__":
    main()
