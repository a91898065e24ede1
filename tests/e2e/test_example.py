"""The training example and the demo, as a user runs them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_kit import Agent, Job

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"
DEMO = EXAMPLE.with_name("demo.py")
DEMO_LIMIT_SECONDS = 120


def _load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_an_epoch_sees_every_sample_once_in_the_same_batches(world_size: int) -> None:
    example = _load_example()
    samples, epoch = 1437, 7
    alone = example.shard(samples, epoch, 0, 1)
    shares = [example.shard(samples, epoch, rank, world_size) for rank in range(world_size)]
    for step, batch in enumerate(alone):
        together = [index for share in shares for index in share[step].tolist()]
        assert sorted(together) == sorted(batch.tolist())
    assert sorted(index for batch in alone for index in batch.tolist()) == list(range(samples))


def test_workers_of_the_example_end_with_an_agent_that_is_killed(
    target: Target, tmp_path: Path
) -> None:
    def example(agent: Agent) -> list[str]:
        return [
            str(EXAMPLE),
            f"--progress-file={agent.progress_path}",
            f"--checkpoint-dir={tmp_path / 'checkpoints'}",
            "--step-delay-seconds=0.05",
            "--epochs=10000",
        ]

    with Job(target, "1:1", program=example) as job:
        agent = job.start("only")
        job.wait_for_world(agent)
        assert agent.worker_pids()
        agent.kill_agent()
        job.wait_until("the orphaned worker ends", lambda: not agent.worker_pids(), 5.0)


@pytest.mark.full
@pytest.mark.timeout(DEMO_LIMIT_SECONDS + 30)
def test_demo_tells_its_story_in_plain_text_when_there_is_no_terminal() -> None:
    demo = subprocess.run(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEMO_LIMIT_SECONDS,
    )
    assert demo.returncode == 0, demo.stdout
    assert "\x1b" not in demo.stdout
    for words in ("is killed", "recovery from the loss", "growth to three", "test accuracy"):
        assert words in demo.stdout


@pytest.mark.full
def test_interrupted_demo_ends_its_agents_and_workers(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as demo:
        assert demo.stdout is not None
        assert any("round 1: 3 nodes" in line for line in demo.stdout)
        assert _processes_that_name(str(tmp_path))
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=30.0)
    assert demo.returncode == 128 + signal.SIGINT
    assert not _processes_that_name(str(tmp_path))


def _processes_that_name(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                found.append(command)
    return found
