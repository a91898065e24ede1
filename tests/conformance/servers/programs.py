"""Where the programs of servers are on this machine, and as whom they run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdzv.conformance.servers.base import ServerFailed, ServerUnavailable

SAY_VERSION_SECONDS_MAX = 10.0
PREPARE_SECONDS_MAX = 120.0
LOG_LINES = 15
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
"""Debian keeps daemons there, and a user's PATH does not name them."""
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 2 << 30
"""What is written there survives the death of a process as well as what is on a disk does, and a
disk that others use makes databases slow enough for tests to miss their deadlines."""
BECOME = (
    "import os, signal, sys, warnings; [signal.signal(one, signal.SIG_DFL) for one in "
    "(signal.SIGPIPE, signal.SIGXFSZ)]; uid, gid = map(int, sys.argv[1:3]); os.setgroups([]); "
    "os.setgid(gid); os.setuid(uid); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""The program of a Python that gives way to a command of another user's, who may not be able to
read a module: ``execvp`` imports one. Python ignores two signals, which a program would inherit."""
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZDIR")


@dataclass(frozen=True, slots=True)
class Program:
    """The main program of a server."""

    path: Path
    origin: str
    """Where it was found, in words."""
    parts: tuple[Path, ...] = ()
    """The folders that it consists of, beside each other: they can be copied."""

    def version(self) -> str:
        """What ``--version`` says; cheap, and asked before anything runs."""
        try:
            said = subprocess.run(
                [self.path, "--version"],
                capture_output=True,
                text=True,
                timeout=SAY_VERSION_SECONDS_MAX,
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        found = re.search(r"\d+(\.\d+)+", said)
        return found[0] if found else f"of unknown version ({said.strip()[:99]})"

    def beside(self, *names: str) -> Path:
        """A program that belongs to it: in the same folder, else on PATH."""
        # Of the program itself: PATH may name a link. (It is started by the link, though, since
        # Redis goes by the name that it is called by.)
        for name in names:
            for folder in (self.path.resolve().parent, self.path.parent):
                if (folder / name).exists():
                    return folder / name
        for name in names:
            elsewhere = shutil.which(name)
            if elsewhere:
                return Path(elsewhere)
        raise ServerUnavailable(f"{self.path} is there, but not {' or '.join(names)}")


def on_path(*names: str) -> Program | None:
    """The first of the names on PATH or in the system's folders."""
    for name in names:
        path = shutil.which(name)
        if path and not _is_python_script(path):
            return Program(Path(path), "on PATH")
        for folder in SYSTEM_FOLDERS:
            if os.access(f"{folder}/{name}", os.X_OK):
                return Program(Path(folder, name), f"in {folder}")
    return None


def _is_python_script(path: str) -> bool:
    """Whether it is a wheel's command, which starts the server as a child: what is killed or paused
    then is not the server. A shell's script is thought to become the server."""
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first


def in_wheel(distribution: str, package: str, pattern: str, *more: str) -> Program | None:
    """A program that a wheel brings; ``more`` are folders beside the package that it needs."""
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        found = sorted(Path(folder).glob(pattern))
        if found:
            version = importlib.metadata.version(distribution)
            parts = (Path(folder), *(Path(folder).parent / name for name in more))
            return Program(found[0], f"of the wheel {distribution} {version}", parts)
    return None


def unprivileged(names: Iterable[str]) -> pwd.struct_passwd | None:
    """For a program that refuses root: whom to run it as; None where we are not root."""
    if os.geteuid() != 0:
        return None
    for name in (*names, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServerUnavailable("it refuses to run as root, and there is no user to run it as")


def reachable(path: Path) -> bool:
    """Whether everybody can read and enter it."""
    needed = stat.S_IROTH | stat.S_IXOTH
    inner = path.stat().st_mode & needed == needed
    return inner and all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)


def _is_roomy(folder: Path) -> bool:
    """Whether servers can keep their data there, and run from there."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    free = disk.f_bavail * disk.f_frsize
    return (
        free >= MEMORY_BYTES_MIN and not disk.f_flag & os.ST_NOEXEC and os.access(folder, os.W_OK)
    )


@dataclass(frozen=True)
class Workplace:
    """A throw-away folder, and the user whom it belongs to."""

    directory: Path
    user: pwd.struct_passwd | None

    @classmethod
    def make(cls, technology: str, user: pwd.struct_passwd | None) -> Workplace:
        """In memory if there is room, else in a folder for temporary files; where the user can
        get. The environment's TMPDIR comes first."""
        disks = [Path(folder) for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp")]
        parents = disks if os.environ.get("TMPDIR") or not _is_roomy(MEMORY) else [MEMORY, *disks]
        fit = [one for one in parents if one.is_dir() and (user is None or reachable(one))]
        if not fit:
            raise ServerUnavailable(f"no folder for temporary files that {user} can reach")
        directory = Path(tempfile.mkdtemp(prefix=f"rdzv-{technology}-", dir=fit[0]))
        if user is not None:
            os.chown(directory, user.pw_uid, user.pw_gid)
        return cls(directory, user)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return str(error)
        return "\n".join(lines[-LOG_LINES:])

    def bring(self, program: Program) -> Program:
        """The program, or a copy of it if it is where the user cannot get: a virtual environment
        below /root, for instance."""
        if self.user is None or reachable(program.path):
            return program
        if not program.parts:
            raise ServerUnavailable(
                f"{program.path} refuses to run as root, and {self.user.pw_name} cannot reach it"
            )
        for part in program.parts:
            copy = self.directory / "program" / part.name
            if not copy.exists():
                shutil.copytree(part, copy, symlinks=True)
        (self.directory / "program").chmod(0o755)
        inside = program.path.relative_to(program.parts[0].parent)
        return Program(self.directory / "program" / inside, program.origin)

    def environment(self) -> dict[str, str]:
        """Without the user's settings for such servers, of which there are many."""
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        own = {"HOME": str(self.directory), "TMPDIR": str(self.directory), "LC_ALL": "C"}
        # Releases of etcd before 3.5 want to be told that this is meant.
        return {**kept, **own, "ETCD_UNSUPPORTED_ARCH": "arm64"}

    def words(self, command: Sequence[str | Path]) -> list[str | Path]:
        """The command, so that it runs as this user."""
        if self.user is None:
            return list(command)
        # Not by what ``subprocess`` offers for that: to change the user it forks this process with
        # all that is in it, and gRPC's threads may crash in the child before the command begins.
        numbers = (str(self.user.pw_uid), str(self.user.pw_gid))
        return [sys.executable, "-IS", "-c", BECOME, *numbers, *command]

    def run(self, *command: str | Path, text: str = "") -> None:
        """Run a command that prepares the data. Raises :class:`ServerFailed` with what it said."""
        done = self._run(command, text)
        if done.returncode != 0:
            said = "\n".join(done.stdout.splitlines()[-LOG_LINES:])
            raise ServerFailed(f"{command[0]} failed with {done.returncode}:\n{said}")

    def _run(self, command: Sequence[str | Path], text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(command),
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.directory,
            env=self.environment(),
            timeout=PREPARE_SECONDS_MAX,
        )
