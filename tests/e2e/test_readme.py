"""The README's first example does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_kit import Job

README = Path(__file__).resolve().parents[2] / "README.md"
SCRIPT = "train.py"
ENDPOINT = "/tmp/rdzv.db"


def _options() -> list[str]:
    """What the README gives to torchrun before the name of the script."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- test: two agents -->\n```sh\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    program, *options, script = shlex.split(blocks[0].replace("\\\n", " "), comments=True)
    assert (program, script) == ("torchrun", SCRIPT)
    assert any(option.endswith(ENDPOINT) for option in options)
    return options


def test_the_same_command_on_two_nodes_makes_one_world(target: Target, tmp_path: Path) -> None:
    endpoint = tmp_path / "readme.db"
    options = [option.replace(ENDPOINT, str(endpoint)) for option in _options()]
    with Job(target, "1:2") as job:
        for name in ("first", "second"):
            job.launch(name, options)
        world = job.wait_for_world(*job.agents)
        assert len(world.agents) == 2
        job.finish(*job.agents)
    assert endpoint.exists()
