"""Whatever lies in a checkpoint directory, commands and loads work or raise errors of ours."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from jobrunner import JobRunner, JobRunnerError, MultiNodeCheckpointManager, Session
from jobrunner.checkpoint.log.heartbeat import Patience
from jobrunner.testing import FaultyFiles
from tests.mutants import fuzz
from tests.mutants.operations import Clock
from tests.mutants.seeds import make_seeds
from tests.mutants.trees import write_tree
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches files by inotify")

QUICK = ("two_runs", "killed", "stacks", "format_1")


@sampled("count", sample=350, nightly=100_000)
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


@sampled("count", sample=24, nightly=3_000)
def test_a_run_resumes_from_a_mutant_or_says_why(
    inproc_session: Session, tmp_path: Path, count: int
) -> None:
    seeds = {seed.name: seed for seed in make_seeds(QUICK[:3])}
    numbers = itertools.count(random.SystemRandom().randrange(1 << 30) if count > 100 else 0)
    ends: Counter[str] = Counter()
    while ends.total() < count:
        number = next(numbers)
        mutant = fuzz.draw_mutant(number, seeds)
        if mutant is None:
            continue
        path = str(tmp_path / "mutant")
        write_tree(mutant.tree, path)
        clock = Clock()
        manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
        manager.run.patience = Patience(15, clock, clock.wait)
        error = None
        try:
            epochs = manager.epochs()
            epoch = epochs[-1] if number % 2 and epochs else "latest"
            runner = JobRunner(
                mutant.seed.job(), manager, num_epochs=4, resume_from_epoch=epoch, max_restarts=0
            )
            runner.run(inproc_session)
        except JobRunnerError as caught:
            error = caught
        except Exception as caught:
            pytest.fail(f"seed {number}: {fuzz.explain(caught)}: {mutant.mutation}")
        ends[type(error).__name__] += 1
        shutil.rmtree(path)
    assert ends["NoneType"] > count / 10
    assert ends["CheckpointCorruptError"] > count / 10


FAULTS = {
    "exception": "1 / 0",
    "code": "eval('1')",
    "code ": "import this",
    "read outside": "open(case.path + '/../canary/file').close()",
    "read outside ": "os.listdir('/')",
    "write outside": "os.truncate(case.path + '/../canary/file', 1)",
    "write outside ": "os.mkdir(case.path + '/../new'); os.rmdir(case.path + '/../new')",
    "hang": "time.sleep(99)",
    "hang ": "while True: pass",
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
