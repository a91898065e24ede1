"""The README's first example does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from .harness import HERE, Agent, Job, Target

README = HERE.parents[1] / "README.md"
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


def test_the_same_command_on_two_nodes_makes_one_world(tmp_path: Path) -> None:
    endpoint = tmp_path / "rdzv.db"
    options = [option.replace(ENDPOINT, str(endpoint)) for option in _options()]
    folder = tmp_path / "job"
    job = Job(Target("sqlite", str(endpoint), wipe=lambda: None), folder, "1:2")
    try:
        for name in ("first", "second"):
            agent = Agent(name, folder)
            job.agents.append(agent)
            worker = [str(HERE / "worker.py"), "--collective", f"--stop-file={folder / 'stop'}"]
            script = [*worker, f"--progress-file={agent.progress_path}"]
            agent.start(options, script, traced=False, fault="")
        world = job.wait_for_world(*job.agents)
        assert len(world.agents) == 2
        job.finish(*job.agents)
    finally:
        job.close()
    assert endpoint.exists()
