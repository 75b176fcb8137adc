"""Whatever lies in a checkpoint directory, commands and loads work or raise errors of ours."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.mutants import fuzz
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches files by inotify")

QUICK = ("two_runs", "killed", "stacks", "format_3")


@sampled("count", sample=700, nightly=100_000)
def test_mutants_give_values_or_errors_of_ours(count: int) -> None:
    is_nightly = count > 10_000
    first = random.SystemRandom().randrange(1 << 30) if is_nightly else 0
    names, most = (fuzz.NAMES, 99) if is_nightly else (QUICK, 1)
    ends, bad = fuzz.run(first, count, names, most)
    print(f"{ends.total()} operations, {ends['']} of which worked; bad: {len(bad)}")
    if bad:
        again = f"Repeat one: python tests/mutants/fuzz.py --seed {bad[0].number}"
        pytest.fail(f"{fuzz.tell(bad)}\n{again}", pytrace=False)
    assert ends[""] > ends.total() / 20
    assert ends["CheckpointCorruptError"] > ends.total() / 20


FAULTS = {
    "exception": "1 / 0",
    "code": "eval('1')",
    "code ": "import this",
    "read outside": "open(case.path + '/../canary/file').close()",
    "read outside ": "os.listdir('/')",
    "write outside": "os.truncate(case.path + '/../canary/file', 1)",
    "write outside ": "os.mkdir(case.path + '/../new'); os.rmdir(case.path + '/../new')",
    "hang": "time.sleep(9)",
    "memory": "bytearray(1 << 33)",
    "nameless": "raise CheckpointError('something is wrong')",
    "wrong data": "case._check('0' * 64, 'x', 1)",
}


@pytest.mark.nightly
def test_what_must_not_happen_is_noticed(tmp_path: Path) -> None:
    """In a process of its own, because what watches it cannot be taken back."""
    script = """
        import os, sys, time
        from pathlib import Path
        from jobrunner.errors import CheckpointError
        from tests.mutants import fuzz
        from tests.mutants.seeds import make_seeds
        from tests.mutants.test_mutants import FAULTS
        from tests.mutants.watch import limit_memory
        lab = fuzz.Lab(make_seeds(["killed"]), Path(sys.argv[1]), most=1)
        lab.prepare()
        limit_memory()
        mutants = (fuzz.draw_mutant(number, lab.by_name) for number in range(999))
        numbers = [i for i, it in enumerate(mutants) if it and not it.is_signed]
        for what, code in FAULTS.items():
            fault = compile(code, "fault", "exec")
            scope = {**globals()}
            fuzz.operate = lambda case, name: exec(fault, {**scope, "case": case})
            found = {it.what for it in lab.try_number(numbers.pop())}
            print(what, found)
            assert what.strip() in found
            assert found <= {what.strip(), "code"}  # that `exec`
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
