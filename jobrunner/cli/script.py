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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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


def parse_target(text: str) -> Target:
    """Parse ``FILE_OR_MODULE[:NAME]``; a file ends in ``.py`` or contains a path separator."""
    source, separator, name = text.rpartition(":")
    if not separator or "/" in name or "\\" in name:  # C:\job.py
        source, name = text, ""
    is_file = source.endswith(".py") or "/" in source or os.sep in source
    is_module = all(part.isidentifier() for part in source.split("."))
    if (separator and source != text and not name.isidentifier()) or not (is_file or is_module):
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
        is_file = self._target.is_file
        self._module = _import_file(Path(self._source)) if is_file else _import(self._source)

    def job(self, parameters: Mapping[str, str] | None = None) -> Job:
        """The job NAME, or the only one, made with `parameters`."""
        found = _find(self._module, self._target)
        name = self._target.name
        where = self._source if name is None else f"{self._source}:{name}"
        arguments = {}
        if is_job_function(found):
            arguments = read_parameters(found, parameters or {})
        elif parameters:
            raise DefinitionError(
                f"{where} takes no --param {next(iter(parameters))}: parameters need a function "
                f"that has the decorator @jobrunner.job and returns a Job."
            )
        if isinstance(found, Job):
            return found
        made = self._call(lambda: found(**arguments), "failed")
        if not isinstance(made, Job):
            raise DefinitionError(f"{where}() returned {made!r:.80}; expected a Job.")
        return made

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
        found = self.find(name, "--callback")
        if not (isinstance(found, type) or inspect.isroutine(found)):
            return found
        check_call(found, 0, (), f"--callback {name}")
        return self._call(found, f"failed for --callback {name}")

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

    def _call(self, make: Callable[[], Any], what: str) -> Any:
        try:
            return make()
        except (Exception, SystemExit) as error:
            file = getattr(self._module, "__file__", None)
            raise _explain(error, self._source, file, what) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DefinitionError(
            f"There is no file {str(path)!r} in {os.getcwd()!r}. Name a Python file or an "
            f"importable module that defines a job."
        )
    # A name of its own: the script may import a package with the name of its file. With "-", so that
    # processes that have not loaded it know the file's name.
    name = SCRIPT_PREFIX + re.sub(r"[^\w-]", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None:
        raise DefinitionError(f"{str(path)!r} is not a Python file: its name must end in '.py'.")
    _put_first(str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not `exec_module`: its cached bytecode may be older than an edit of the last second.
        exec(
            compile(path.read_bytes(), str(path.resolve()), "exec", dont_inherit=True), vars(module)
        )
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _explain(error, str(path), str(path.resolve())) from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _import(name: str) -> ModuleType:
    _put_first(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _explain(error, name, None) from error
        raise DefinitionError(
            f"There is no module {name!r}: {error.name!r} was not found in {os.getcwd()!r} or "
            f"among the installed packages. To name a file, include '.py'."
        ) from error
    except (Exception, SystemExit) as error:
        spec = importlib.util.find_spec(name) if "." not in name else None
        raise _explain(error, name, spec.origin if spec else None) from error


def _put_first(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _explain(
    error: Exception | SystemExit, source: str, file: str | None, what: str = "cannot be imported"
) -> DefinitionError:
    """Name the line of the user's own file that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == file]
    if isinstance(error, SyntaxError):
        where, why = f"{error.filename}, line {error.lineno}", error.msg
    else:
        frame = own[-1] if own else frames[-1]
        where, why = f"{source if own else frame.filename}, line {frame.lineno}", str(error)
    kind = "" if isinstance(error, DefinitionError) else f"{type(error).__name__}: "
    is_exit = isinstance(error, SystemExit)
    hint = ". Exit only under `if __name__ == '__main__':`." if is_exit else ""
    explained = DefinitionError(f"{source} {what} ({where}): {kind}{why}{hint}")
    if not isinstance(error, DefinitionError):
        trace = error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame.f_globals.get("__name__", "")):
            trace = trace.tb_next
        explained.add_note("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    return explained


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("jobrunner", "importlib")


def _find(module: ModuleType, target: Target) -> Job | Callable[..., Any]:
    """A job, or a function to be called for one."""
    if target.name is None:
        return _find_only(module, target.source)
    where = f"{target.source}:{target.name}"
    if not hasattr(module, target.name):
        raise DefinitionError(
            f"{target.source} has no {target.name!r}.{_offer(module, target.source)}"
        )
    found = getattr(module, target.name)
    if isinstance(found, Job) or is_job_function(found):
        return cast("Job | Callable[..., Any]", found)
    signature = None
    if callable(found) and not isinstance(found, type):
        with contextlib.suppress(ValueError):  # a function written in C
            signature = inspect.signature(found)
    if signature is None:
        raise DefinitionError(
            f"{where} is {found!r:.80}; expected a Job, or a function that returns one."
            f"{_offer(module, target.source)}"
        )
    try:
        signature.bind()
    except TypeError:
        raise DefinitionError(
            f"{where}{signature} cannot be called without arguments. Give each parameter a default "
            f"value, or the function the decorator @jobrunner.job."
        ) from None
    return cast("Callable[..., Any]", found)


def _find_only(module: ModuleType, source: str) -> Job | Callable[..., Any]:
    named = _jobs_of(module)
    found = {id(value): value for value in named.values()}
    if len(found) == 1:
        return next(iter(found.values()))
    raise DefinitionError(
        f"{source} defines {len(found) or 'no'} jobs; expected one.{_offer(module, source)}"
    )


def _jobs_of(module: ModuleType) -> dict[str, Job | Callable[..., Any]]:
    """The jobs of a module, and the functions that make them and have the decorator `job`."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Job) or is_job_function(value)
    }


def _offer(module: ModuleType, source: str) -> str:
    names = sorted(_jobs_of(module))
    if not names:
        return (
            f" No variable of {source} is a Job, and no function has the decorator @job. If a "
            f"function returns the job, name it: {source}:FUNCTION."
        )
    return f" Name one of its jobs: {', '.join(f'{source}:{name}' for name in names)}."
