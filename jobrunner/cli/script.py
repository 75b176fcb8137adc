"""Find the job that a script or a module defines, and what else options name there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from jobrunner.define import Job, is_job_function, read_parameters
from jobrunner.errors import DefinitionError
from jobrunner.texts import SCRIPT_PREFIX

if TYPE_CHECKING:
    from jobrunner.checkpoint import MultiNodeCheckpointManager


class Script:
    """The file or module that ``FILE_OR_MODULE[:JOB]`` names, imported.

    The directory of the file, or for a module the current directory, goes to the front of
    ``sys.path``, as with ``python``. The functions and classes of a file are sent to workers by
    value, so workers do not need the file.
    """

    def __init__(self, text: str) -> None:
        self._source, _, self._name = text.partition(":")
        if self._source.endswith(".py"):
            self._module = _import_file(self._source)
        else:
            self._module = _import_module(self._source)

    def job(self, parameters: Mapping[str, str] | None = None) -> Job:
        """The job that was named, or the only one, made with `parameters`."""
        values = vars(self._module)
        names = []
        for name, value in values.items():
            if isinstance(value, Job) or is_job_function(value):
                names.append(name)
        hint = (
            f" No variable of {self._source} is a Job, and no function has the decorator @job. "
            f"If a function returns the job, name it: {self._source}:FUNCTION."
        )
        if names:
            targets = [f"{self._source}:{name}" for name in sorted(names)]
            hint = f" Name one of its jobs: {', '.join(targets)}."
        if not self._name and len({id(values[name]) for name in names}) != 1:
            raise DefinitionError(
                f"{self._source} defines {len(names) or 'no'} jobs; expected one.{hint}"
            )
        name = self._name or names[0]
        if name not in values:
            raise DefinitionError(f"{self._source} has no {name!r}.{hint}")
        job = values[name]
        arguments = {}
        if is_job_function(job):
            arguments = read_parameters(job, parameters or {})
        elif parameters:
            raise DefinitionError(
                f"{self._source}:{name} takes no --param {next(iter(parameters))}: parameters need "
                f"a function that has the decorator @jobrunner.job and returns a Job."
            )
        if inspect.isroutine(job):
            job = self._call(f"{name}()", functools.partial(job, **arguments))
        if not isinstance(job, Job):
            raise DefinitionError(
                f"{self._source}:{name} is {job!r:.80}; expected a Job, or a function that returns "
                f"one.{hint}"
            )
        return job

    def find(self, name: str, option: str) -> Any:
        """The variable, function or class `name`, for an option."""
        if not hasattr(self._module, name):
            raise DefinitionError(
                f"{option} {name}: {self._source} has no {name!r}. Name a variable, function or "
                f"class of it."
            )
        return getattr(self._module, name)

    def callback(self, name: str) -> Any:
        """The callback `name`; a function or class makes it."""
        value = self.find(name, "--callback")
        if isinstance(value, type) or inspect.isroutine(value):
            return self._call(f"--callback {name}", value)
        return value

    def manager(
        self, name: str, path: str, options: Mapping[str, Any]
    ) -> MultiNodeCheckpointManager:
        """What the function `name` makes of a checkpoint directory and options: its manager."""
        from jobrunner.checkpoint import MultiNodeCheckpointManager, absolute_path

        function = self.find(name, "--manager")
        manager = self._call(f"--manager {name}", lambda: function(path, **options))
        is_manager = isinstance(manager, MultiNodeCheckpointManager)
        if is_manager and manager.path == absolute_path(path):
            return cast("MultiNodeCheckpointManager", manager)
        raise DefinitionError(
            f"--manager {name}: expected a MultiNodeCheckpointManager of {path}, which is the "
            f"argument of {name}; got {manager!r:.200}."
        )

    def _call(self, call: str, function: Callable[[], Any]) -> Any:
        with _explained(f"{self._source}: {call} failed", self._module.__file__):
            return function()


def _import_file(source: str) -> ModuleType:
    path = Path(source)
    try:
        code = path.read_bytes()
    except OSError as error:
        raise DefinitionError(
            f"Cannot read {source!r} in {os.getcwd()!r}: {error.strerror}. Name a Python file that "
            f"this user may read, or an importable module, that defines a job."
        ) from error
    # A name of its own: the script may import a package with the name of its file. With "-", so that
    # processes that have not loaded it know the file's name.
    name = SCRIPT_PREFIX + re.sub(r"[^\w-]", "_", path.stem)
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    _put_first(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    linecache.checkcache(str(path))
    linecache.getlines(str(path))  # as it is now, for tracebacks of tasks
    try:
        with _explained(f"{source} cannot be imported", str(path)):
            # Not `exec_module`: its cached bytecode may be older than an edit of the last second.
            exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))
    except DefinitionError:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


def _import_module(name: str) -> ModuleType:
    _put_first(os.getcwd())
    with _explained(f"Module {name} cannot be imported. A file would be named with '.py'", None):
        return importlib.import_module(name)


def _put_first(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


@contextlib.contextmanager
def _explained(failure: str, file: str | None) -> Iterator[None]:
    """Raise DefinitionError for an error of the user's code, which names the last line of `file`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                place = f" ({file}, line {frame.lineno})"
        reason = str(error)
        if isinstance(error, SystemExit):
            reason += ". Exit only under `if __name__ == '__main__':`."
        if isinstance(error, DefinitionError):
            raise DefinitionError(f"{failure}{place}: {reason}") from error
        explained = DefinitionError(f"{failure}{place}: {type(error).__name__}: {reason}")
        explained.add_note(_format_trace(error))
        raise explained from error


def _format_trace(error: BaseException) -> str:
    """The traceback from the user's own code on."""
    trace = error.__traceback__
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("jobrunner", "importlib"):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
