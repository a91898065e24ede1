"""The nodes of the demo: each is a torchrun agent, its worker, and the files the two write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARKER = "RDZV_DEMO_NODE"


def marked_processes(marker: str) -> list[int]:
    """Processes that were started with this marker in their environment, orphans included.

    torchrun starts workers in sessions of their own, and orphans get another parent. So neither a
    process group nor a tree of parents finds all of a node; the environment is inherited always.
    """
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # It has ended meanwhile, or belongs to somebody else.
        if wanted in environment:
            found.append(int(folder.name))
    return found


class Node:
    """One node of the job. What its worker reports is read with :meth:`read_progress`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.progress_path = folder / f"{name}.progress.jsonl"
        self.started_at = 0.0
        self.killed = False
        self.last_line: dict[str, Any] = {}
        self._marker = uuid.uuid4().hex
        self._read_bytes = 0
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self, torchrun_options: Sequence[str], script: Sequence[str]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun_options, *script]
        environment = {
            **os.environ,
            MARKER: self._marker,
            "LOGLEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
        }
        self.started_at = time.time()
        with self.log_path.open("wb") as log:
            self._agent = subprocess.Popen(
                [*command, "--progress-file", str(self.progress_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Away from the terminal's Ctrl-C: the demo ends its nodes itself.
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        return None if self._agent is None else self._agent.poll()

    def read_progress(self) -> list[dict[str, Any]]:
        """The lines that the node's worker has written since the last call."""
        try:
            with self.progress_path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        lines = [json.loads(line) for line in complete.splitlines()]
        if lines:
            self.last_line = lines[-1]
        return lines

    def kill(self) -> None:
        """End the node as a power cut does: agent and workers at once, without a word."""
        self.killed = True
        agent = self._agent
        if agent is not None and agent.poll() is None:
            # Stopped first, so that it starts no worker between the search and the kill.
            agent.send_signal(signal.SIGSTOP)
        while pids := marked_processes(self._marker):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if agent is not None:
            agent.wait()
