"""Every argument of every public callable is checked at the call, by type and range."""

import inspect
import math
import re
from decimal import Decimal

import dask
import numpy as np
import pytest

import jobrunner
from jobrunner import DefinitionError, KeepBest, KeepLast, SaveEvery, Task
from jobrunner.checkpoint import FileMetadataHandler
from jobrunner.config import get_number
from jobrunner.story import read_story, write_report

# What jobrunner makes and users only read; and what it calls with arguments of its own.
_MADE = {"Callback", "WorkspaceType", "__version__", "current_task"}
_CALLED_BY_JOBRUNNER = re.compile(
    r"FileMetadataHandler\.|CopyTo\.|.*\.(retires|is_due|epochs_until)$|"
    r"Session\.(bind|run_group|exclusive|reconnect)$|"
    r"TaskGroup\.(add|find|find_named|check_open)$|Task\.|Blob\.on$|"
    r"KeepBest\.(choose|value)$"
)

_CALLABLES = {
    **{name: getattr(jobrunner, name) for name in jobrunner.__all__},
    "FileMetadataHandler": FileMetadataHandler,
    "read_story": read_story,
    "write_report": write_report,
}
# What comes before the check of some arguments.
_NEEDED = {"epoch": 0, "fn": int, "name": "a", "node_name": "a", "path": "runs", "reader": "a"}


def _public():
    """Public functions, classes and their public methods."""
    for name, value in _CALLABLES.items():
        if name in _MADE or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        yield name
        for method in dir(value) if isinstance(value, type) else ():
            full = f"{name}.{method}"
            is_public = not method.startswith("_") and not _CALLED_BY_JOBRUNNER.match(full)
            if is_public and inspect.isroutine(getattr(value, method)):
                yield full


def _function(name):
    """A public callable; methods are those of an object that is not set up."""
    owner, _, method = name.partition(".")
    function = _CALLABLES[owner]
    if method and not inspect.ismethod(getattr(function, method)):
        function = object.__new__(function)
    return getattr(function, method) if method else function


@pytest.mark.parametrize("name", [*_public()])
def test_each_argument_is_checked_before_anything_happens(name):
    function = _function(name)
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        required = [each for each in _NEEDED if each in parameters]
        given = {each: _NEEDED[each] for each in required if each != parameter.name}
        if name not in ("Session.fetch", "TaskGroup.report_step"):  # which need more
            with pytest.raises(DefinitionError) as caught:
                function(**given, **{parameter.name: object()})
            assert parameter.name.removesuffix("_name") in str(caught.value)
        if not takes_any and not name.startswith("Position"):
            misspelt = parameter.name + parameter.name[-1]
            with pytest.raises(DefinitionError, match=f"did you mean {parameter.name}\\?"):
                function(**{misspelt: 1})


@pytest.mark.parametrize(
    ("name", "parameter", "values"),
    [
        ("MultiNodeCheckpointManager", "allow_pickle", ["False", "", 0, 1, 1.0, np.True_]),
        ("KeepLast", "n", ["1", 1.0, True, -1, 0, np.array([1]), None]),
        ("SaveEvery", "seconds", [True, -1, 0, math.nan, math.inf, 1e300, 10**5000, Decimal(1)]),
        ("Node", "name", [b"x", 1, ["x"], None, ""]),
        ("JobRunner", "missing", ["x", "", 1, True, None]),
        ("MultiNodeCheckpointManager", "path", [b"x", 1, "a\0b", "", "\ud800", None]),
        ("CheckpointManager.load", "blobs", ["x", [1], 3]),
        ("MultiNodeCheckpointManager.open", "epoch", ["x", -1, True, 1.0, (1, -1)]),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(name, parameter, values):
    for value in values:
        with pytest.raises(DefinitionError, match=f"{parameter}.* must|cannot name"):
            _function(name)(**{parameter: value})


def test_a_refusal_says_what_it_expected_and_found_of_which_object():
    with pytest.raises(DefinitionError) as caught:
        Task(len, name="count", num_instances=0)
    assert str(caught.value) == "Task 'count': num_instances must be an int >= 1; got 0."
    with pytest.raises(DefinitionError, match="allow_pickle must be True or False; got 'False'"):
        jobrunner.CheckpointManager("runs", "a", allow_pickle="False")


def test_a_time_may_be_a_duration_with_a_unit():
    for text, seconds in {"10min": 600, "30s": 30, "1.5 hours": 5400, " 5 ms ": 0.005}.items():
        assert SaveEvery(seconds=text).seconds == seconds
    for wrong in ("1", "10", "x", "", "min", "5 parsecs", "-5s", "0s", "1e400s", "100 years"):
        with pytest.raises(DefinitionError, match="seconds must be a number of seconds > 0 .* got"):
            SaveEvery(seconds=wrong)
    with dask.config.set({"jobrunner.worker-silence-seconds": "2min"}):
        assert get_number("worker-silence-seconds") == 120


def test_numbers_of_other_libraries_are_numbers():
    assert SaveEvery(seconds=np.float32(0.5)).seconds == 0.5
    for found in (KeepBest("m", np.int64(3)).n, KeepLast(n=np.int8(3)).n):
        assert (found, type(found)) == (3, int)


class Made:
    """A class of a user."""


def test_the_name_of_a_codec_is_clean_and_its_own():
    for wrong in ("a\nb", "a\u202eb", ""):
        with pytest.raises(DefinitionError, match="name must be printable text"):
            jobrunner.register_codec(Made, str, str, name=wrong)
    with pytest.raises(DefinitionError, match="name must be printable text"):
        jobrunner.register_codec(type("C\x1b", (), {}), str, str)
    with pytest.raises(DefinitionError, match="all values are an object"):
        jobrunner.register_codec(object, str, str, subclasses=True)
    jobrunner.register_codec(type("First", (), {}), str, str)
    again = jobrunner.register_codec(type("First", (), {}), str, int)
    with pytest.raises(DefinitionError, match=r"codec of First already has the name .*First"):
        jobrunner.register_codec(Made, str, str, name=again.name)
