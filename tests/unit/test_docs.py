"""What the documentation says holds: links, options and defaults, commands, Python code."""

from __future__ import annotations

import logging
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.run import get_args_parser

from rdzv.backends.sql import SqlBackend
from rdzv.cli import main as rdzv_command
from rdzv.codec import encode_state
from rdzv.ranks import RANK_ORDERS
from rdzv.registry import known_backends
from rdzv.settings import OPTIONS, Settings
from rdzv.state import State

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = ("build", "dist")
RUN_DEADLINE_SECONDS = 60

EXAMPLES = {"http"}
"""Backends of examples: tests/integration/test_third_party.py runs torchrun with them."""
RUN_AS_A_WHOLE = "docs/writing-a-backend.md"
"""tests/integration/test_writing_a_backend.py does, with the backend that it is about."""
WITHOUT_DOCUMENTATION = {
    "heartbeat_timeout": "torch's name, accepted for its users; nothing of ours waits for it",
    "key_prefix": "of a backend that is yet to come",
}
"""Options that no page has a row for, and why."""


class Page(NamedTuple):
    path: Path
    text: str

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def prose(self) -> str:
        """Without code blocks."""
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    def blocks(self, language: str) -> list[str]:
        fence = rf"^```{language}\n(.*?)^```$"
        return re.findall(fence, self.text, flags=re.MULTILINE | re.DOTALL)

    def inline_code(self) -> list[str]:
        return re.findall(r"`([^`\n]+)`", self.prose)

    def anchors(self) -> set[str]:
        """As GitHub makes them of headings."""
        found: list[str] = []
        for title in re.findall(r"^#{1,6} +(.*?) *$", self.prose, flags=re.MULTILINE):
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
            slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
        return set(found)

    def links(self) -> list[str]:
        without_code = re.sub(r"`[^`\n]*`", "", self.prose)
        return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code)

    def options(self) -> Iterator[tuple[str, str]]:
        """Names and defaults in tables of options."""
        tables = re.findall(r"^\| option \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", self.text, re.M)
        for row in "".join(tables).splitlines():
            name, default = (cell.strip(" `") for cell in row.split("|")[1:3])
            yield name, default


def _pages() -> list[Page]:
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS
    ]
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    return [Page(path, path.read_text(encoding="utf-8")) for path in sorted(files)]


PAGES = _pages()
BY_NAME = {page.name: page for page in PAGES}
FOR_USERS = [page for page in PAGES if page.name == "README.md" or page.name.startswith("docs/")]


def _commands(program: str) -> list[list[str]]:
    """The arguments of each of its calls in code blocks, continuation lines joined."""
    found = []
    for page in PAGES:
        for block in page.blocks("sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0].rpartition("/")[2] == program:
                    found.append(words[1:])
    return found


def _defaults() -> Settings:
    return Settings.from_parameters(RendezvousParameters("sqlite", "/tmp/x.db", "job1", 1, 1))


def test_pages_are_found() -> None:
    """Without this, a changed lay-out would turn every test here into one that checks nothing."""
    assert {"README.md", "CONTRIBUTING.md", "docs/guarantees.md", "docs/sqlite.md"} <= set(BY_NAME)
    assert len(BY_NAME["README.md"].links()) >= 5
    assert "an-agent-alone-is-killed" in BY_NAME["docs/guarantees.md"].anchors()
    assert len(list(BY_NAME["README.md"].options())) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links():
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.name} links to {link}, which does not exist"
        assert path.is_relative_to(ROOT), f"{page.name} links to {link}, outside the repository"
        if anchor:
            anchors = BY_NAME[path.relative_to(ROOT).as_posix()].anchors()
            assert anchor in anchors, f"{page.name} links to {link}, a heading that is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Page) -> None:
    for code in page.inline_code():
        if re.fullmatch(
            r"(?:backends|benchmarks|docs|examples|handler|stores|tests)/[\w./]*", code
        ):
            assert (ROOT / code).exists(), f"{page.name} names {code}"
    beside = {path.name for path in page.path.parent.rglob("*.py")}
    theirs = {"train.py", *re.findall(r"<!-- file: (\S+) -->", page.text), *beside}
    for module in set(re.findall(r"(?<![/\w])[a-z_]+\.py\b", page.text)) - theirs:
        assert (ROOT / "handler" / module).exists(), f"{page.name} names {module}"


# Options


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: page.name)
def test_options_exist_and_have_the_stated_defaults(page: Page) -> None:
    defaults = _defaults()
    names = [name for name, _ in page.options()]
    assert len(names) == len(set(names)), f"{page.name} has an option twice"
    for name, stated in page.options():
        assert name in OPTIONS, f"{page.name} has a row for {name}, which is no option"
        if name == "password_file":
            value = defaults.password
        elif hasattr(defaults, f"{name}_seconds"):
            value = getattr(defaults, f"{name}_seconds")
        else:
            value = getattr(defaults, name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        expected = {"True": "true", "False": "false", "None": ""}.get(shown, shown)
        assert stated == expected, f"{page.name}: the default of {name} is {expected!r}"


def test_every_option_is_documented_or_has_a_reason() -> None:
    documented = {name for page in FOR_USERS for name, _ in page.options()}
    assert documented | set(WITHOUT_DOCUMENTATION) == OPTIONS
    assert not documented & set(WITHOUT_DOCUMENTATION)


def test_all_rank_orders_are_documented() -> None:
    row = re.search(r"^\| `rank_order` \|.*$", BY_NAME["README.md"].text, re.MULTILINE)
    assert row is not None
    for rank_order in RANK_ORDERS:
        assert f"`{rank_order}`: " in row[0]


def test_times_in_sentences() -> None:
    defaults = _defaults()
    lifetime_seconds = defaults.outage_timeout_seconds + defaults.closed_grace_seconds
    for name, sentence in (
        ("README.md", f"`closed_grace` ({defaults.closed_grace_seconds:g} s)"),
        ("docs/guarantees.md", f"{defaults.liveness_window_seconds:g} s by default"),
        ("docs/sqlite.md", f"({lifetime_seconds / 60:g} minutes by default)"),
        ("docs/sql.md", f"({lifetime_seconds / 60:g} minutes by default)"),
    ):
        assert sentence in BY_NAME[name].text, f"{name} should say: {sentence}"


# Commands


def test_torchrun_commands_can_work(caplog: pytest.LogCaptureFixture) -> None:
    commands = _commands("torchrun")
    assert len(commands) >= 3
    built = {known.name for known in known_backends() if known.factory} | EXAMPLES
    for command in commands:
        given = get_args_parser().parse_args(command)
        assert given.rdzv_backend in built, f"torchrun {shlex.join(command)}"
        low, _, high = given.nnodes.partition(":")
        options = dict(pair.split("=") for pair in given.rdzv_conf.split(",") if pair)
        params = RendezvousParameters(
            given.rdzv_backend,
            given.rdzv_endpoint,
            given.rdzv_id,
            int(low),
            int(high or low),
            **options,
        )
        with caplog.at_level(logging.WARNING):
            Settings.from_parameters(params)
    assert not caplog.records, caplog.text


def test_backends_that_are_named_exist() -> None:
    names = {known.name for known in known_backends()} | EXAMPLES | {"NAME"}
    pattern = r"--(?:rdzv-)?backend[= ]([\w-]+)"
    found = [
        name
        for page in PAGES
        if page.name != RUN_AS_A_WHOLE
        for name in re.findall(pattern, page.text)
    ]
    assert len(found) >= 4
    assert set(found) <= names


def test_rdzv_commands_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [code for page in PAGES for code in page.inline_code() if code.startswith("rdzv ")]
    assert {"rdzv check", "rdzv state"} <= {" ".join(code.split()[:2]) for code in codes}
    SqlBackend(str(tmp_path / "rdzv.db"), "job1").set_state(encode_state(State("i")), None)
    for code in set(codes):
        words = shlex.split(code.replace("/tmp", str(tmp_path)))[1:]
        if len(words) > 1:
            assert rdzv_command(words) == 0, f"{code}: {capsys.readouterr()}"
        with pytest.raises(SystemExit) as ended:
            rdzv_command([words[0], "--help"])
        assert ended.value.code == 0, code


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\b([A-Z_]+)\b", makefile))
    commands = _commands("make")
    for page in PAGES:
        commands += [code.split()[1:] for code in page.inline_code() if code.startswith("make ")]
    assert len(commands) >= 5
    for word in (word for command in commands for word in command):
        name, assigns, _ = word.partition("=")
        assert name in (variables if assigns else targets), f"make {word}"


# Python

PYTHON_BLOCKS = [
    (page.name, block)
    for page in FOR_USERS
    for block in page.blocks("python")
    if page.name != RUN_AS_A_WHOLE or "<!-- file:" not in page.text.partition(block)[0][-60:]
]
TIES_TO_PARENT = [block for _, block in PYTHON_BLOCKS if "PR_SET_PDEATHSIG" in block]
WORKER = """
import os, sys
print(os.getpid(), flush=True)
sys.stdin.readline()
print("alive", flush=True)
"""
AGENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "worker.py"], start_new_session=True).wait()
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl is a call of Linux")


@on_linux
@pytest.mark.parametrize(("name", "block"), PYTHON_BLOCKS)
def test_python_runs(name: str, block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_SECONDS,
    )
    assert done.returncode == 0, f"{name}: {done.stderr}"


@on_linux
@pytest.mark.parametrize("tied", [True, False])
def test_a_worker_dies_with_its_agent(tied: bool, tmp_path: Path) -> None:
    """Without the block in the guarantees, which shows that it is the block that does it, the
    worker lives on."""
    (block,) = TIES_TO_PARENT
    (tmp_path / "worker.py").write_text((block if tied else "") + WORKER)
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with agent:
        worker_pid = int(agent.stdout.readline())
        assert worker_pid != agent.pid
        agent.kill()
        assert agent.wait(RUN_DEADLINE_SECONDS) == -signal.SIGKILL
        # Ends when nobody holds the pipe any more: when the worker is gone, too.
        answer, _ = agent.communicate("\n", timeout=RUN_DEADLINE_SECONDS)
    assert answer == ("" if tied else "alive\n")


@on_linux
def test_a_worker_whose_agent_has_just_died_ends(tmp_path: Path) -> None:
    """The kernel signals only deaths after the request, so the block looks once more."""
    (block,) = TIES_TO_PARENT
    adopted = "import os\nparents = iter([4711, 1])\nos.getppid = lambda: next(parents)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{adopted}{block}print('went on')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
