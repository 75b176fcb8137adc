"""Find the job that a script or a module defines, for the command line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from jobrunner.define import Job, check_call, is_job_function, read_parameters
from jobrunner.errors import DefinitionError
from jobrunner.texts import SCRIPT_PREFIX

if TYPE_CHECKING:
    from jobrunner.checkpoint import MultiNodeCheckpointManager


class Target(NamedTuple):
    """The parts of ``FILE_OR_MODULE[:NAME]``."""

    source: str
    is_file: bool
    name: str | None

    def __str__(self) -> str:
        return self.source if self.name is None else f"{self.source}:{self.name}"


def parse_target(text: str) -> Target:
    """Parse ``FILE_OR_MODULE[:NAME]``; a file ends in ``.py`` or contains a path separator."""
    source, separator, name = text.rpartition(":")
    if not separator or "/" in name or "\\" in name:  # C:\job.py
        source, separator, name = text, "", ""
    is_file = source.endswith(".py") or "/" in source or os.sep in source
    is_module = all(part.isidentifier() for part in source.split("."))
    if (separator and not name.isidentifier()) or not (is_file or is_module):
        raise DefinitionError(
            f"{text!r} does not name a job. Expected FILE.py, FILE.py:NAME, package.module or "
            f"package.module:NAME, where NAME is a variable or function."
        )
    return Target(source, is_file, name or None)


class Script:
    """The file or module that ``FILE_OR_MODULE[:NAME]`` names, imported.

    The directory of the file, or for a module the current directory, goes to the front of
    ``sys.path``, as with ``python``. The functions and classes of a file are sent to workers by
    value, so workers do not need the file.
    """

    def __init__(self, text: str) -> None:
        self._target = parse_target(text)
        self._source = self._target.source
        if self._target.is_file:
            self._module = _import_file(self._source)
        else:
            self._module = _import_module(self._source)

    def job(self, parameters: Mapping[str, str] | None = None) -> Job:
        """The job NAME, or the only one, made with `parameters`."""
        definition = self._find_job()
        arguments = {}
        if is_job_function(definition):
            arguments = read_parameters(definition, parameters or {})
        elif parameters:
            raise DefinitionError(
                f"{self._target} takes no --param {next(iter(parameters))}: parameters need a "
                f"function that has the decorator @jobrunner.job and returns a Job."
            )
        if isinstance(definition, Job):
            return definition
        job = self._call(lambda: definition(**arguments), "failed")
        if not isinstance(job, Job):
            raise DefinitionError(f"{self._target}() returned {job!r:.80}; expected a Job.")
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
        if not (isinstance(value, type) or inspect.isroutine(value)):
            return value
        check_call(value, 0, (), f"--callback {name}")
        return self._call(value, f"failed for --callback {name}")

    def manager(self, name: str, path: str) -> MultiNodeCheckpointManager:
        """What the function `name` makes of a checkpoint directory: its manager."""
        from jobrunner.checkpoint import MultiNodeCheckpointManager, absolute_path

        function = self.find(name, "--manager")
        check_call(function, 1, (), f"--manager {name}")
        manager = self._call(lambda: function(path), f"failed for --manager {name}")
        if not isinstance(manager, MultiNodeCheckpointManager):
            raise DefinitionError(
                f"--manager {name}: expected a MultiNodeCheckpointManager from {name}({path!r}); got "
                f"{manager!r:.80}."
            )
        if manager.path != absolute_path(path):
            raise DefinitionError(
                f"--manager {name}: expected a manager of {path}, the directory that {name} gets; "
                f"got one of {manager.path}. Pass its argument on."
            )
        return manager

    def _call(self, function: Callable[[], Any], failure: str) -> Any:
        file = getattr(self._module, "__file__", None)
        with _explained(self._source, file, failure):
            return function()

    def _find_job(self) -> Any:
        """A job, or a function that makes one."""
        jobs = {}
        for name, value in vars(self._module).items():
            if isinstance(value, Job) or is_job_function(value):
                jobs[name] = value
        wanted = self._target.name
        if wanted is None:
            distinct = {id(job): job for job in jobs.values()}
            if len(distinct) == 1:
                return next(iter(distinct.values()))
            raise DefinitionError(
                f"{self._source} defines {len(distinct) or 'no'} jobs; expected one."
                f"{self._name_jobs(jobs)}"
            )
        if not hasattr(self._module, wanted):
            raise DefinitionError(f"{self._source} has no {wanted!r}.{self._name_jobs(jobs)}")
        if wanted in jobs:
            return jobs[wanted]
        value = getattr(self._module, wanted)
        signature = None
        if callable(value) and not isinstance(value, type):
            with contextlib.suppress(ValueError):  # a function written in C
                signature = inspect.signature(value)
        if signature is None:
            raise DefinitionError(
                f"{self._target} is {value!r:.80}; expected a Job, or a function that returns one."
                f"{self._name_jobs(jobs)}"
            )
        try:
            signature.bind()
        except TypeError:
            raise DefinitionError(
                f"{self._target}{signature} cannot be called without arguments. Give each parameter "
                f"a default value, or the function the decorator @jobrunner.job."
            ) from None
        return value

    def _name_jobs(self, names: Mapping[str, Any]) -> str:
        """What could have been named."""
        if not names:
            return (
                f" No variable of {self._source} is a Job, and no function has the decorator @job. "
                f"If a function returns the job, name it: {self._source}:FUNCTION."
            )
        targets = [f"{self._source}:{name}" for name in sorted(names)]
        return f" Name one of its jobs: {', '.join(targets)}."


def _import_file(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        raise DefinitionError(
            f"There is no file {source!r} in {os.getcwd()!r}. Name a Python file or an "
            f"importable module that defines a job."
        )
    # A name of its own: the script may import a package with the name of its file. With "-", so that
    # processes that have not loaded it know the file's name.
    name = SCRIPT_PREFIX + re.sub(r"[^\w-]", "_", path.stem)
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise DefinitionError(f"{source!r} is not a Python file: its name must end in '.py'.")
    _put_first(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _explained(source, str(path)):
            # Not `exec_module`: its cached bytecode may be older than an edit of the last second.
            exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except DefinitionError:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


def _import_module(name: str) -> ModuleType:
    _put_first(os.getcwd())
    file = None
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec(name) if "." not in name else None
        file = spec.origin if spec else None
    with _explained(name, file):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            is_target = error.name is not None and f"{name}.".startswith(f"{error.name}.")
            if not is_target:  # it imports one that is missing
                raise
            missing = str(error.name)
    raise DefinitionError(
        f"There is no module {name!r}: {missing!r} was not found in {os.getcwd()!r} or among the "
        f"installed packages. To name a file, include '.py'."
    )


def _put_first(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


@contextlib.contextmanager
def _explained(
    source: str, file: str | None, failure: str = "cannot be imported"
) -> Iterator[None]:
    """Raise DefinitionError for an error of the user's code, which names the line that failed.

    That is a line of `file` if there is one, else the innermost.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        place, reason = _locate(error, source, file)
        if not isinstance(error, DefinitionError):
            reason = f"{type(error).__name__}: {reason}"
        if isinstance(error, SystemExit):
            reason += ". Exit only under `if __name__ == '__main__':`."
        explained = DefinitionError(f"{source} {failure} ({place}): {reason}")
        if not isinstance(error, DefinitionError):
            explained.add_note(_format_trace(error))
        raise explained from error


def _locate(error: Exception | SystemExit, source: str, file: str | None) -> tuple[str, str]:
    """Where an error was raised, and why."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}", error.msg
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if own:
        return f"{source}, line {own[-1].lineno}", str(error)
    return f"{frames[-1].filename}, line {frames[-1].lineno}", str(error)


def _format_trace(error: Exception | SystemExit) -> str:
    """The traceback from the user's own code on."""
    trace = error.__traceback__
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("jobrunner", "importlib"):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
