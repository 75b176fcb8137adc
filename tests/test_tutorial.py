"""The tutorial's commands run as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_tutorial_kills_a_run_and_resumes_it_to_the_same_bits(tmp_path: Path) -> None:
    text = _TUTORIAL.read_text()
    (code,) = re.findall(r"<!-- file: walkers.py -->\n```python\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "walkers.py").write_text(code)
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    killed, *rest = commands
    assert killed.endswith("& sleep 5; kill -9 $!")
    bin_directory = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}"}

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or "kill -9" in command, (
            f"{command}\n{done.stdout}{done.stderr}"
        )
        assert "leaked" not in done.stderr
        return done.stdout

    run(killed)
    said = {command: run(command) for command in rest}
    resumed = said[killed.partition(" & ")[0]]
    assert re.match(r"from epoch \d+: it is the last epoch recorded", resumed), resumed
    (differences,) = (text for command, text in said.items() if " diff " in command)
    assert differences == "4 blobs are equal, 0 differ.\n"
    (look,) = re.findall(r"^```py\n(.*?)^```$", text, re.M | re.S)
    run(f"python - <<'END'\n{look}END")
