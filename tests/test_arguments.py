"""Every flag, number and name of every public callable is checked at the call, by type and range."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest

import jobrunner
from jobrunner import DefinitionError, Job, JobRunner, KeepBest, KeepLast, Node, Task
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

_CALLABLES: Mapping[str, Any] = {
    **{name: getattr(jobrunner, name) for name in jobrunner.__all__},
    "FileMetadataHandler": FileMetadataHandler,
    "read_story": read_story,
    "write_report": write_report,
}

_HUGE = 10**5000  # too long for `repr`
_WRONG: Mapping[str, list[object]] = {
    "bool": ["False", "", 0, 1, 1.0, np.True_, object()],
    "int": ["1", 1.0, True, -1, np.array([1]), object()],
    "float": ["1", True, -1, math.nan, math.inf, 1e300, _HUGE, Decimal(1), object()],
    "str": [b"x", 1, object(), ["x"]],
    "Literal": ["x", "", 1, True, object()],
    "PathLike": [b"x", 1, object(), "a\0b", "", "\ud800"],
    "": [object()],
    "object": [object(), 3],
}
_NAMES_OF_TYPES = {
    "ResumeFrom": "int | None",
    "EpochLike": "int",
    "SaveErrorPolicy": "Literal",
    "Missing": "Literal",
    "Over": "Literal",
    "Count": "int",
    "Natural": "int",
    "Seconds": "float",
    "Interval": "float",
    "Label": "str",
    "Number": "int | float",
    "Weight": "int | float",
}
_NAME_OF_TYPE = re.compile(rf"\b({'|'.join(_NAMES_OF_TYPES)})\b")
_ANNOTATED = re.compile(r"""Annotated\[(.*), (?:\w+|"[^"]*"|'[^']*')\]""")


def _written(annotation: object) -> str:
    """An annotation without the rules in it."""
    plain = _ANNOTATED.sub(r"\1", str(annotation))
    return _NAME_OF_TYPE.sub(lambda it: _NAMES_OF_TYPES[it[0]], plain)


def _kind(annotation: str) -> str:
    """What the parameter takes, for simple types; "" for mixed ones; "object" for others."""
    text = _written(annotation).replace(" | None", "")
    if "PathLike" in text or text.startswith("Literal"):
        return "PathLike" if "PathLike" in text else "Literal"
    if text in _WRONG:
        return text
    return "" if re.search(r"\b(bool|int|float|str|Input)\b", text) else "object"


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, classes and their public methods, by name."""
    for name, value in _CALLABLES.items():
        if name in _MADE or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        yield name, value
        for method in dir(value) if isinstance(value, type) else ():
            full = f"{name}.{method}"
            is_public = not method.startswith("_") and not _CALLED_BY_JOBRUNNER.match(full)
            is_builtin = hasattr(int, method) and issubclass(value, int)
            if is_public and inspect.isroutine(getattr(value, method)) and not is_builtin:
                yield full, getattr(value, method)


def _parameters() -> list[tuple[str, str, str]]:
    """The callable, the parameter and its kind."""
    return [
        (name, parameter.name, _kind(str(parameter.annotation)))
        for name, function in _public()
        for parameter in inspect.signature(function).parameters.values()
        if name != "Session.fetch"  # which first needs an open session
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name != "self"
    ]


class _Made:
    """Objects whose methods are called, and the arguments of a call that is right."""

    def __init__(self, path: Path) -> None:
        self.path = path / "runs"
        self.manager = jobrunner.MultiNodeCheckpointManager(self.path)
        self.one = jobrunner.CheckpointManager(self.path, "a")
        self.node = Node("n")
        with Job("made") as self.job:
            self.task = Task(int, node=self.node)
        jobrunner.epoch_limiter(self.job, 1)
        self.runner = JobRunner(self.job, self.manager)

    def call(self, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        objects = {
            "MultiNodeCheckpointManager": self.manager,
            "CheckpointManager": self.one,
            "Node": self.node,
            "Job": self.job,
            "JobRunner": self.runner,
            "TaskGroup": self.job.epoch_group,
        }
        owner, _, method = name.partition(".")
        function = _CALLABLES[owner]
        if method:
            function = getattr(objects.get(owner, function), method)
        # None for what is asked for but comes after the check of the flags, numbers and names.
        needed = {
            **dict.fromkeys(
                ("node_name", "metric", "name", "node", "label", "blob", "reader"), "a"
            ),
            **dict.fromkeys(("epoch", "step", "n", "num_epochs"), 1),
            **dict.fromkeys(("condition", "task_or_group", "blob_or_output"), None),
            **dict.fromkeys(("fn", "encode", "decode"), str),
            "cls": Made,
            "job": self.job,
            "path": self.path,
            "session": object.__new__(jobrunner.Session),
            "address": "tcp://127.0.0.1:1",
            "blob_names": ["x"],
        }
        parameters = inspect.signature(function).parameters.values()
        required = [it.name for it in parameters if it.default is it.empty and it.kind < 4]
        return function, {it: needed[it] for it in required if it in needed}


class Made:
    """A class of a user."""


@pytest.mark.parametrize(("name", "parameter", "kind"), _parameters())
def test_a_wrong_argument_is_refused_before_anything_happens(
    name: str, parameter: str, kind: str, tmp_path: Path
) -> None:
    made = _Made(tmp_path)
    function, right = made.call(name)
    about = inspect.signature(function).parameters[parameter]
    optional = about.default is None or "None" in _written(about.annotation)
    for wrong in [*_WRONG[kind], *([] if optional or kind in ("", "object") else [None])]:
        with pytest.raises(DefinitionError) as caught:
            function(**{**right, parameter: wrong})
        text = str(caught.value)
        plain, name_in_text = (
            it.lower().replace("_", " ") for it in (text, parameter.removesuffix("_name"))
        )
        assert name_in_text in plain or "takes a function" in plain, text
        says = re.search("got|must|cannot name", text)
        assert says or kind == "object", text
    assert not list(tmp_path.iterdir())


def test_a_refusal_says_what_it_expected_and_found_of_which_object() -> None:
    with pytest.raises(DefinitionError) as caught:
        Task(len, name="count", num_instances=0)
    assert str(caught.value) == "Task 'count': num_instances must be an int >= 1; got 0."


_FIXED = [
    name
    for name, function in _public()
    if not any(it.kind is it.VAR_KEYWORD for it in inspect.signature(function).parameters.values())
    and inspect.signature(function).parameters.keys() - {"self"}
    and not name.startswith("Position")
]


@pytest.mark.parametrize("name", _FIXED)
def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant(
    name: str, tmp_path: Path
) -> None:
    function, right = _Made(tmp_path).call(name)
    with pytest.raises(DefinitionError, match=f"{name}.* has no argument 'nonsense'; "):
        function(**right, nonsense=1)
    for parameter in inspect.signature(function).parameters.keys() - {"self"}:
        misspelt = parameter + parameter[-1]
        given = {key: value for key, value in right.items() if key != parameter}
        with pytest.raises(DefinitionError, match=f"'{misspelt}'; did you mean {parameter}\\?"):
            function(**given, **{misspelt: 1})


def test_a_time_may_be_a_duration_with_a_unit() -> None:
    for text, seconds in {"10min": 600, "30s": 30, "1.5 hours": 5400, " 5 ms ": 0.005}.items():
        assert jobrunner.SaveEvery(seconds=text).seconds == seconds  # type: ignore[arg-type]
    for wrong in ("1", "10", "x", "", "min", "5 parsecs", "-5s", "0s", "1e400s", "100 years"):
        with pytest.raises(DefinitionError, match="seconds must be a number of seconds > 0 .* got"):
            jobrunner.SaveEvery(seconds=wrong)  # type: ignore[arg-type]
    with dask.config.set({"jobrunner.worker-silence-seconds": "2min"}):
        assert get_number("worker-silence-seconds") == 120


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert jobrunner.SaveEvery(seconds=np.float32(0.5)).seconds == 0.5  # type: ignore[arg-type]
    for found in (KeepBest("m", np.int64(3)).n, KeepLast(n=np.int8(3)).n):  # type: ignore[arg-type]
        assert (found, type(found)) == (3, int)


def test_the_name_of_a_codec_is_clean_and_its_own() -> None:
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
