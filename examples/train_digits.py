"""Train a small classifier on scikit-learn's digits under an elastic ``torchrun``.

    torchrun --nnodes=2:3 --nproc-per-node=1 --max-restarts=3 \\
        --rdzv-backend=sqlite --rdzv-endpoint=/shared/rdzv.db --rdzv-id=digits \\
        examples/train_digits.py --checkpoint-dir /shared/checkpoints

What an elastic script must take care of, and where it is done here:

* A worker may be stopped at any moment and started again with another rank in a world of another
  size. So nothing but the checkpoint is carried over: :func:`load_checkpoint`.
* The result must not depend on the world size. A step always consumes one global batch, which the
  ranks share out: :func:`shard`, :func:`train_epoch`.
* When a peer is lost, the collective raises or hangs. Raising is enough: the process ends with a
  non-zero status and torchrun starts it again, up to ``--max-restarts`` times. A node that joins is
  no failure and costs no restart: the agent stops its workers with SIGTERM and starts new ones. A
  worker that hangs in a collective is stopped the same way once the loss was noticed.
* An agent that is killed cannot stop its workers: :func:`end_with_agent`.

The data set comes with scikit-learn; nothing is downloaded. All nodes share the checkpoint folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def end_with_agent() -> None:
    """Let the kernel kill this process as soon as its torchrun agent is gone (Linux only).

    torchrun starts workers in sessions of their own, so ``kill -9`` on an agent, or the kernel
    when memory runs out, leaves them running: they keep the accelerator and the peers' collectives
    alive, on a node that the others have given up. Copy this function into a script of yours and
    call it first, before the slow imports.

    SIGKILL, because a worker that is blocked in a collective cannot run a handler of its own. The
    signal comes when the *thread* that started this process ends; torchrun starts its workers
    from its main thread.
    """
    agent_pid = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    # An agent that ended before the call above sends no signal any more. It shows by another
    # parent, which took this process over.
    if os.getppid() != agent_pid:
        sys.exit("The torchrun agent ended while this worker was starting.")


if __name__ == "__main__" and sys.platform == "linux":
    end_with_agent()

# The imports below take seconds, in which the agent may die: so they come after the call above.
# ruff: noqa: E402
import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

TEST_SAMPLES = 360
GLOBAL_BATCH_SAMPLES = 128
LEARNING_RATE = 0.05
SEED = 20


class Progress:
    """Writes one JSON object a line, to a file that several processes may append to, or stdout."""

    def __init__(self, path: Path | None) -> None:
        self._descriptor = 1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **values: Any) -> None:
        line = {
            "event": event,
            "time": time.time(),
            "pid": os.getpid(),
            "agent_pid": os.getppid(),
            "run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            # Every round has a bootstrap address of its own, so this tells rounds apart.
            "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            # Counts failures only: torchrun does not move it when nodes join.
            "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
            **values,
        }
        # One write of a short line in append mode: lines of several processes do not mix.
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


class Digits:
    """The data set, split the same way on every node and in every round."""

    def __init__(self) -> None:
        bunch = load_digits()
        images = torch.tensor(bunch.data, dtype=torch.float32) / 16.0
        labels = torch.tensor(bunch.target, dtype=torch.int64)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
        test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
        self.train_images, self.train_labels = images[train], labels[train]
        self.test_images, self.test_labels = images[test], labels[test]


def build_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def shard(samples: int, epoch: int, rank: int, world_size: int) -> list[torch.Tensor]:
    """This rank's part of each global batch of an epoch.

    The order depends on the epoch alone. So an epoch sees every sample once, whatever the number
    of nodes, and an epoch that is started again by another world sees the same batches.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch))
    return [batch[rank::world_size] for batch in torch.split(order, GLOBAL_BATCH_SAMPLES)]


def save_checkpoint(
    folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Replace the checkpoint so that whoever is killed meanwhile leaves the old or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".checkpoint-", delete=False) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, folder / "checkpoint.pt")


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer on all ranks and return the number of epochs done.

    Rank 0 reads and broadcasts, so that all ranks start from the same checkpoint even if the
    folder looks different from one node to another for a moment.
    """
    box: list[Any] = [None]
    path = folder / "checkpoint.pt"
    if dist.get_rank() == 0 and path.exists():
        box = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    model.load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    return int(box[0]["epoch"])


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    epoch: int,
    step_delay_seconds: float,
) -> float:
    """One pass over the training data; the mean loss over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = len(digits.train_labels)
    total = torch.zeros(1)
    for step, index in enumerate(shard(samples, epoch, rank, world_size)):
        batch_samples = min(GLOBAL_BATCH_SAMPLES, samples - step * GLOBAL_BATCH_SAMPLES)
        optimizer.zero_grad()
        output = model(digits.train_images[index])
        loss = nn.functional.cross_entropy(output, digits.train_labels[index], reduction="sum")
        # DistributedDataParallel averages over ranks. Dividing by the global batch, and taking the
        # average back, gives the same gradient for every world size and every uneven share.
        torch.autograd.backward(loss * world_size / batch_samples)
        optimizer.step()
        total += loss.detach()
        if step_delay_seconds > 0:
            time.sleep(step_delay_seconds)
    dist.all_reduce(total)
    return total.item() / samples


def test_accuracy(model: nn.Module, digits: Digits) -> float:
    with torch.no_grad():
        predicted = model(digits.test_images).argmax(dim=1)
    return int((predicted == digits.test_labels).sum()) / TEST_SAMPLES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on digits under an elastic torchrun.")
    parser.add_argument("--epochs", type=int, default=30, help="over all rounds together")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--progress-file", type=Path, help="JSON lines go here, not to stdout")
    parser.add_argument(
        "--step-delay-seconds", type=float, default=0.0, help="to have time to look"
    )
    return parser.parse_args()


@record
def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # The model is too small to be worth more.
    progress = Progress(arguments.progress_file)
    progress.write("started")
    dist.init_process_group("gloo")
    digits, model = Digits(), build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    done_epochs = load_checkpoint(arguments.checkpoint_dir, model, optimizer)
    parallel = DistributedDataParallel(model)
    progress.write("resumed", epoch=done_epochs)

    for epoch in range(done_epochs + 1, arguments.epochs + 1):
        loss = train_epoch(parallel, optimizer, digits, epoch, arguments.step_delay_seconds)
        # Every rank has taken part in the sum of losses, so no other world can be training by now.
        if dist.get_rank() == 0:
            save_checkpoint(arguments.checkpoint_dir, epoch, model, optimizer)
        progress.write("epoch", epoch=epoch, loss=round(loss, 5))

    progress.write("finished", epoch=arguments.epochs, accuracy=test_accuracy(model, digits))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
