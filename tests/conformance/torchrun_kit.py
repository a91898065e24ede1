"""Real torchrun agents on this machine, and what a clause does to them.

A node is an agent with its workers. All of a node's processes carry a marker in their environment,
by which they are found, under ``/proc``, whatever session or parent they have.

Rules:

* A lost node means its agent *and* its workers: a killed agent leaves its workers running.
* Nothing here sleeps for a fixed time: :func:`wait_until` polls a condition and has a deadline.
* Every process of a job has ended when its block has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rdzv.conformance.clauses import Function, book
from rdzv.conformance.target import Target

T = TypeVar("T")
Line = dict[str, Any]
Program = Callable[["Agent"], Sequence[str]]
"""What an agent is to start, as torchrun takes it: a script or ``-m`` and a module, and its
arguments. It writes a progress file as :mod:`rdzv.conformance.torchrun_worker` does."""

MARKER = "RDZV_TORCHRUN_NODE"
TRACE_VARIABLE = "RDZV_TORCHRUN_TRACE"
FAULT_VARIABLE = "RDZV_TORCHRUN_FAULT"
KILL_BEFORE_CONFIRM = "kill_before_confirm"
"""What the launcher reads from its environment."""
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 25

KEEP_ALIVE_INTERVAL_SECONDS = 1.0
LIVENESS_WINDOW_SECONDS = 4.0
"""Below about four seconds, a small machine on which several processes import torch at once makes
healthy nodes look lost."""
CONFIGURATION = {
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "4",
    "last_call_timeout": "1",
    "join_timeout": "60",
}
RESTARTS_WITHOUT_CLOCK = 3
"""Where no backend tells how old a change is, agents act on it one after another, and who is late
finds its workers failed by those of its peers."""

CHANGE_DEADLINE_SECONDS = 45.0
EXIT_DEADLINE_SECONDS = 45.0


def torchrun_book(
    group: str,
    *,
    needs: tuple[str, ...] = (),
    controls: tuple[str, ...] = (),
    timeout_seconds: float = 180.0,
) -> Callable[[Function], Function]:
    """:func:`rdzv.conformance.clauses.book` for clauses that start torchrun."""
    return book(
        "torchrun",
        group,
        needs=needs,
        controls=("torchrun", *controls),
        timeout_seconds=timeout_seconds,
    )


@dataclass(frozen=True)
class World:
    """A round as its workers see it. The constructor's caller has checked that they agree."""

    master: str
    agents: tuple[Agent, ...]
    """In rank order."""


def wait_until(
    what: str, condition: Callable[[], T | None], deadline_seconds: float, agents: Iterable[Agent]
) -> T:
    """What the condition returns as soon as it is neither None nor False.

    Raises AssertionError, with the ends of the agents' logs, when that takes too long.
    """
    deadline = time.monotonic() + deadline_seconds
    pause = threading.Event()
    while True:
        found = condition()
        if found is not None and found is not False:
            return found
        if time.monotonic() > deadline:
            logs = "\n".join(agent.log_tail() for agent in agents)
            raise AssertionError(f"not within {deadline_seconds:.0f} s: {what}\n{logs}")
        pause.wait(POLL_SECONDS)


def processes_with(marker: str) -> list[int]:
    """Running processes that inherited this marker; a zombie's environment reads as empty."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            numeric = folder.name.isdigit()
            if numeric and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def read_lines(path: Path) -> list[Line]:
    """The complete JSON lines of a file that is still being written."""
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


class Agent:
    """One node: a torchrun agent and its workers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.progress_path = folder / f"{name}.progress.jsonl"
        self._trace_path = folder / f"{name}.trace.jsonl"
        self._log_path = folder / f"{name}.log"
        self._marker = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return self.name

    def start(
        self,
        options: Sequence[str],
        program: Sequence[str],
        *,
        traced: bool = False,
        fault: str = "",
    ) -> None:
        """``traced`` and ``fault``: see :mod:`rdzv.conformance.torchrun_launcher`."""
        launcher = "torch.distributed.run"
        environment = {
            **os.environ,
            MARKER: self._marker,
            "LOGLEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
        }
        if traced or fault:
            launcher = "rdzv.conformance.torchrun_launcher"
            environment[TRACE_VARIABLE] = str(self._trace_path)
            environment[FAULT_VARIABLE] = fault
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", launcher, *options, *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    # What is seen of it

    @property
    def pid(self) -> int:
        """The agent's, not its workers'."""
        return self._started.pid

    @property
    def exit_code(self) -> int | None:
        return self._started.poll()

    def log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def log_tail(self) -> str:
        lines = self.log().splitlines()[-LOG_TAIL_LINES:]
        seen = [f"{line['event']} {line}" for line in self.progress()[-3:]]
        return "\n".join([f"--- {self.name}, status {self.exit_code}", *lines, *seen])

    def progress(self) -> list[Line]:
        """What its workers have reported, oldest first."""
        return read_lines(self.progress_path)

    @property
    def workers_started(self) -> int:
        """How many workers it has had."""
        return [line["event"] for line in self.progress()].count("started")

    def trace(self, event: str) -> list[Line]:
        """What the launcher saw the handler do; for agents that were started ``traced``."""
        return [line for line in read_lines(self._trace_path) if line["event"] == event]

    def worker_pids(self) -> list[int]:
        return [pid for pid in processes_with(self._marker) if pid != self._started.pid]

    def wait_for_trace(
        self, event: str, count: int = 1, deadline_seconds: float = CHANGE_DEADLINE_SECONDS
    ) -> Line:
        """The count-th line of this kind."""

        def find() -> Line | None:
            code = self.exit_code
            lines = self.trace(event)
            if len(lines) >= count:
                return lines[count - 1]
            assert code is None, f"{self} ended without: {event} ({count})\n{self.log_tail()}"
            return None

        return wait_until(f"{self} {event} ({count})", find, deadline_seconds, [self])

    def wait_for_exit(self, deadline_seconds: float = EXIT_DEADLINE_SECONDS) -> int:
        """Its exit status; negative when a signal ended it."""
        return wait_until(f"{self} ends", lambda: self._status(), deadline_seconds, [self])[0]

    def _status(self) -> tuple[int] | None:
        code = self.exit_code
        return None if code is None else (code,)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self} was not started"
        return self._process

    # What is done to it

    def kill_node(self) -> None:
        """End agent and workers at once, as a power cut does."""
        process = self._process
        if process is not None and process.poll() is None:
            # Stopped first, so that it starts no worker between the search and the kill.
            process.send_signal(signal.SIGSTOP)
        wait_until(f"no process of {self}", self._kill_rest, EXIT_DEADLINE_SECONDS, [])
        if process is not None:
            process.wait()

    def _kill_rest(self) -> bool:
        self._signal_node(signal.SIGKILL)
        return not processes_with(self._marker)

    def kill_agent(self) -> None:
        """End the agent alone with SIGKILL."""
        self._started.kill()
        self._started.wait()

    def terminate(self) -> None:
        """Ask the agent to end, as a scheduler does."""
        self._started.terminate()

    def pause_agent(self) -> None:
        self._started.send_signal(signal.SIGSTOP)

    def pause_node(self) -> None:
        """Freeze agent and workers: sockets stay open, so peers hang rather than fail."""
        self.pause_agent()
        self._signal_node(signal.SIGSTOP)

    def resume_node(self) -> None:
        self._signal_node(signal.SIGCONT)

    def _signal_node(self, number: signal.Signals) -> None:
        for pid in processes_with(self._marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Job:
    """The agents of one run id on a target. Without ``program`` they train as
    :mod:`rdzv.conformance.torchrun_worker` does. Every agent that it has started has ended, with
    its workers, when its block ends."""

    def __init__(
        self,
        target: Target,
        nnodes: str,
        *,
        max_restarts: int | None = None,
        run_id: str = "job",
        collective: bool = True,
        program: Program | None = None,
        **configuration: str,
    ) -> None:
        self.agents: list[Agent] = []
        self._target = target
        self._scratch = tempfile.TemporaryDirectory(prefix="rdzv-torchrun-")
        self.folder = Path(self._scratch.name)
        self._stop_path = self.folder / "stop"
        self._nnodes = nnodes
        self._run_id = run_id
        self._collective = collective
        self._program = program or self.worker
        self._configuration = {**CONFIGURATION, **configuration}
        if max_restarts is None:
            max_restarts = RESTARTS_WITHOUT_CLOCK if "server_clock" in target.without else 0
        self._max_restarts = max_restarts

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill_node()
        self._scratch.cleanup()

    def start(
        self,
        name: str,
        *,
        traced: bool = False,
        fault: str = "",
        max_restarts: int | None = None,
        **configuration: str,
    ) -> Agent:
        """Start a node; what is given here overrides the job's settings for it alone."""
        restarts = self._max_restarts if max_restarts is None else max_restarts
        options = [
            f"--nnodes={self._nnodes}",
            "--nproc-per-node=1",
            f"--max-restarts={restarts}",
            *self._meeting_place({**self._configuration, **configuration}),
            f"--log-dir={self.folder / 'torchrun'}",
        ]
        return self.launch(name, options, traced=traced, fault=fault)

    def launch(self, name: str, options: Sequence[str], **how: Any) -> Agent:
        """Start a node with these options of torchrun and no others."""
        agent = Agent(name, self.folder)
        self.agents.append(agent)
        agent.start(options, self._program(agent), **how)
        return agent

    def worker(self, agent: Agent) -> list[str]:
        """The kit's own program for this agent."""
        return [
            *("-m", "rdzv.conformance.torchrun_worker"),
            f"--progress-file={agent.progress_path}",
            f"--stop-file={self._stop_path}",
            *(["--collective"] if self._collective else []),
        ]

    def _meeting_place(self, configuration: dict[str, str]) -> list[str]:
        arguments = self._target.torchrun_arguments(self._run_id)
        assert arguments is not None
        option = "--rdzv-conf="
        given = [text.removeprefix(option) for text in arguments if text.startswith(option)]
        theirs = dict(pair.split("=", 1) for text in given for pair in text.split(","))
        pairs = {**theirs, **configuration}
        others = [text for text in arguments if not text.startswith(option)]
        return [*others, option + ",".join(f"{key}={value}" for key, value in pairs.items())]

    def wait_until(
        self,
        what: str,
        condition: Callable[[], T | None],
        deadline_seconds: float = CHANGE_DEADLINE_SECONDS,
    ) -> T:
        """:func:`wait_until` with the logs of all agents."""
        return wait_until(what, condition, deadline_seconds, self.agents)

    def hold_for(self, what: str, condition: Callable[[], object], seconds: float) -> None:
        """Fail as soon as the condition no longer holds within the next seconds."""
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < deadline:
            if not condition():
                logs = "\n".join(agent.log_tail() for agent in self.agents)
                raise AssertionError(f"not for {seconds:.0f} s: {what}\n{logs}")
            pause.wait(POLL_SECONDS)

    def wait_for_world(
        self,
        *agents: Agent,
        after: World | None = None,
        deadline_seconds: float = CHANGE_DEADLINE_SECONDS,
    ) -> World:
        """The world that consists of exactly these nodes, once all their workers are ready.

        ``after``: not this one again, even if it has the same nodes.
        """

        def find() -> World | None:
            ended = [agent for agent in agents if agent.exit_code is not None]
            logs = "\n".join(agent.log_tail() for agent in ended)
            assert not ended, f"{ended} ended instead of forming a world of {agents}\n{logs}"
            return _common_world(agents, after)

        what = f"a world of {list(agents)}"
        return self.wait_until(what, find, deadline_seconds)

    def finish(self, *agents: Agent) -> None:
        """Let the workers end well and see that these agents do, too."""
        self._stop_path.touch()
        codes = {agent.name: agent.wait_for_exit() for agent in agents}
        logs = "\n".join(agent.log_tail() for agent in agents if codes[agent.name] != 0)
        assert set(codes.values()) == {0}, f"{codes}\n{logs}"


def _common_world(agents: Sequence[Agent], after: World | None) -> World | None:
    """The world that the last worker of each of these agents is ready in, if it is the same."""
    lines = []
    for agent in agents:
        progress = agent.progress()
        started = [line for line in progress if line["event"] == "started"]
        ready = [line for line in progress if line["event"] in ("ready", "resumed")]
        if not ready or ready[-1]["pid"] != started[-1]["pid"]:
            return None
        lines.append(ready[-1])
    masters = {line["master"] for line in lines}
    if len(masters) != 1 or {line["world_size"] for line in lines} != {len(agents)}:
        return None
    if after is not None and masters == {after.master}:
        return None
    by_rank = {line["rank"]: agent for line, agent in zip(lines, agents, strict=True)}
    assert sorted(by_rank) == list(range(len(agents))), f"ranks are wrong: {lines}"
    return World(masters.pop(), tuple(by_rank[rank] for rank in range(len(agents))))
