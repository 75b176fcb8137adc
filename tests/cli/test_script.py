"""How the command line finds the job in a script or a module."""

import sys

import cloudpickle
import pytest

from jobrunner.cli.script import Script
from jobrunner.errors import DefinitionError
from tests.cli.directories import invoke

_IMPORT = "from jobrunner.define.jobs import Job\n"
_MAKE = """from jobrunner import job
@job
def make(lr: float = 0.1, n=1, sizes: list[int] = [], fast=False): return Job('made')
"""


def _write(directory, text, name="script.py"):
    path = directory / name
    path.write_text(_IMPORT + text)
    return str(path)


def test_the_only_job_needs_no_name_and_a_name_is_a_variable_or_a_function(tmp_path):
    assert (
        Script(_write(tmp_path, "anything = Job('only')\nsame = anything\n")).job().name == "only"
    )
    script = _write(tmp_path, "a = Job('first')\ndef make(name='made'): return Job(name)\n")
    assert Script(f"{script}:a").job().name == "first"
    assert Script(f"{script}:make").job().name == "made"


@pytest.mark.parametrize(
    ("text", "name", "message", "given"),
    [
        ("a = Job('a')\nb = Job('b')\n", "", r"defines 2 jobs.*script\.py:a, .*script\.py:b\.", {}),
        ("", "", r"defines no jobs; expected one.*@job\. .*script\.py:FUNCTION", {}),
        ("a = Job('a')\n", ":b", r"has no 'b'.*script\.py:a\.", {}),
        ("n = 3\n", ":n", "is 3; expected a Job", {}),
        ("def make(n): ...\n", ":make", r"make\(\) failed: .* missing 1 required .* 'n'", {}),
        ("def make():\n    1 / 0\n", ":make", r"failed \(.*, line 3\): ZeroDivisionError", {}),
        ("job = Job('j')\nraise SystemExit(0)\n", "", r"line 3\): SystemExit: 0.*__main__", {}),
        ("def f(:\n", "", r"SyntaxError: .*script\.py, line 2\)", {}),
        (_MAKE + "a = make()", "", r"defines 2 jobs.*script\.py:a, .*script\.py:make", {}),
        (_MAKE, "", r"fast cannot be 'yes'; expected bool \(true or false\)", {"fast": "yes"}),
        ("a = Job('a')", "", r"takes no --param n: .* decorator @jobrunner\.job", {"n": "1"}),
    ],
)
def test_what_makes_no_job_is_refused_with_the_place(tmp_path, text, name, message, given):
    script = _write(tmp_path, text)
    with pytest.raises(DefinitionError, match=f"(?s){message}"):
        Script(script + name).job(given)


def test_a_module_is_found_in_the_current_directory(tmp_path, monkeypatch):
    _write(tmp_path, "job = Job('module')\n", "cli_module_for_test.py")
    monkeypatch.chdir(tmp_path)
    assert Script("cli_module_for_test").job().name == "module"
    for target, says in (
        ("cli_absent_for_test:job", "cannot be imported.*'cli_absent_for_test'"),
        ("gone.py", "Cannot read .*gone.py.*: No such file"),
    ):
        with pytest.raises(DefinitionError, match=says):
            Script(target).job()


def test_an_import_error_shows_the_traceback_of_the_users_code(tmp_path):
    (tmp_path / "helpers_of_mine.py").write_text("def deep(x):\n    return x.nothing\n")
    script = tmp_path / "job.py"
    script.write_text("from helpers_of_mine import deep\n\ndef make():\n    deep(3)\n\nmake()\n")
    text = invoke("run", script, "--checkpoint", tmp_path / "runs").output
    for part in (
        "job.py, line 4",
        "AttributeError: 'int' object has no attribute 'nothing'",
        f'"{script}", line 6, in <module>',
        'helpers_of_mine.py", line 2, in deep',
    ):
        assert part in text
    assert "jobrunner/cli" not in text


def test_a_script_goes_to_workers_by_value_under_a_name_of_its_own(tmp_path):
    script = _write(tmp_path, "job = Job('j')\ndef twice(n): return 2 * n\n", "numpy.py")
    Script(script).job()
    module = sys.modules["jobrunner_script_numpy"]
    text = cloudpickle.dumps(module.twice)
    del sys.modules["jobrunner_script_numpy"]
    assert cloudpickle.loads(text)(4) == 8
    sys.modules["jobrunner_script_numpy"] = module
