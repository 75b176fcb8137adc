"""Jobs as functions of parameters: `job` checks and records what they are called with."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import Parameter
from numbers import Number
from types import NoneType
from typing import Any, ParamSpec, TypeGuard, cast, get_args, get_type_hints

import msgspec

from jobrunner.define.checks import checked
from jobrunner.define.jobs import Job
from jobrunner.define.parameters import HIDDEN
from jobrunner.errors import DefinitionError
from jobrunner.texts import without_credentials

_P = ParamSpec("_P")
_PARAMETERS = "_jobrunner_parameters"
_SECRET = re.compile(
    r"(?!(?:bos|cls|eos|mask|pad|sep|unk)_token$)(?:.*_)?"  # not what tokenizers call theirs
    r"(?:token|(?:password|passwd|passphrase|secret|credential|(?:api|access|secret|private)_?key)s?)",
    re.I,
)
_PLAIN = (bool, int, float, str)


@checked
def job(function: Callable[_P, Job]) -> Callable[_P, Job]:
    """Make a function that returns a `Job` check its arguments, and the job record them.

    Parameters
    ----------
    function : callable
        Each parameter has a type, by its annotation or else its default: bool, int, float, str,
        an ``Enum``, ``Literal``, ``X | None``, or a list, tuple or dict of these.

    Returns
    -------
    callable
        Takes the same arguments. `Job.parameters` of the job that it returns has all of them,
        defaults too: they are recorded in checkpoints, compared at a resume, and shown by
        ``jobrunner ls`` and ``info``. ``jobrunner run FILE --param lr=0.3`` calls it. Of a str, list,
        tuple or dict, only ``…`` is recorded if its parameter, or its key in a dict, is called
        ``password``, ``passwd``, ``secret``, ``token``, ``credential``, ``api_key`` or the like, or
        ends in ``_`` and one of these; in a URL, the credentials are left out.

    Raises
    ------
    DefinitionError
        A parameter has no type or another one. A call raises it if an argument is unknown, missing
        or does not fit its type, or if `function` returns no `Job`.

    Examples
    --------
    >>> @job
    ... def descend(lr: float = 0.1, epochs: int = 10) -> Job:
    ...     with Job("descend") as made:
    ...         Task(lambda w: w * (1 - lr), inputs="w", outputs="w")
    ...     epoch_limiter(made, epochs)
    ...     return made
    >>> descend(lr=0.3).parameters
    {'lr': 0.3, 'epochs': 10}
    """
    if not inspect.isroutine(function):
        raise DefinitionError(f"job takes a function that returns a Job; got {function!r:.200}.")
    signature = inspect.signature(function)
    types = {}
    for parameter in signature.parameters.values():
        types[parameter.name] = _type_of(function, parameter)
    name = function.__name__

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Job:
        bound = _bind(function, signature, args, kwargs)
        bound.apply_defaults()
        for key, value in bound.arguments.items():
            if value is not signature.parameters[key].default:
                bound.arguments[key] = _fit(f"{name}: {key}", value, types[key])
        new_job = function(*bound.args, **bound.kwargs)
        if not isinstance(new_job, Job):
            raise DefinitionError(f"{name}() returned {new_job!r:.80}; expected a Job.")
        new_job.parameters = {}
        for key, value in bound.arguments.items():
            new_job.parameters[key] = _recorded(f"{name}: {key}", key, value)
        return new_job

    setattr(make, _PARAMETERS, types)
    return cast("Callable[_P, Job]", make)


def is_job_function(value: object) -> TypeGuard[Callable[..., Job]]:
    """Whether `job` has made it."""
    return inspect.isroutine(value) and hasattr(value, _PARAMETERS)


def read_parameters(function: Callable[..., Job], texts: Mapping[str, str]) -> dict[str, Any]:
    """Read the arguments of a function that `job` has made, by the types of its parameters.

    Raises `DefinitionError` if it cannot be called with them.
    """
    types = getattr(function, _PARAMETERS)
    name = getattr(function, "__name__", "")
    read = {}
    for parameter, text in texts.items():
        if parameter not in types:
            expected = "it has no parameters"
            if types:
                expected = f"its parameters are {', '.join(types)}"
            raise DefinitionError(f"{name} has no parameter {parameter!r}; {expected}.")
        read[parameter] = _read(f"{name}: {parameter}", text, types[parameter])
    _bind(function, inspect.signature(function), (), read)
    return read


def _bind(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        shown = signature.replace(return_annotation=signature.empty)
        raise DefinitionError(f"{function.__name__}{shown} cannot be called: {error}.") from None


def _type_of(function: Callable[..., Any], parameter: Parameter) -> Any:
    where = f"job: parameter {parameter.name!r} of {function.__name__}"
    if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
        raise DefinitionError(f"{where} must be an ordinary one; got {parameter}.")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise DefinitionError(f"{where}: an annotation cannot be read: {error}.") from None
    if parameter.name in hints:
        kind = hints[parameter.name]
    elif type(parameter.default) in _PLAIN:
        kind = type(parameter.default)
    else:
        raise DefinitionError(
            f"{where} needs a type: annotate it, as in `{parameter.name}: float`."
        )
    try:
        msgspec.json.schema(kind)  # only of what JSON can hold
    except (TypeError, NameError):
        raise DefinitionError(
            f"{where} has the type {getattr(kind, '__name__', kind)}, which cannot be recorded. "
            f"Use bool, int, float, str, an Enum, a Literal, or a list, tuple or dict of these."
        ) from None
    default = parameter.default
    if default is not parameter.empty:
        _fit(where, default, kind)
    return kind


def _fit(where: str, value: Any, kind: Any) -> Any:
    if isinstance(value, Number) and hasattr(value, "item"):  # of NumPy
        value = value.item()
    try:
        return msgspec.convert(msgspec.to_builtins(value), kind)  # of members of an Enum, too
    except (msgspec.ValidationError, TypeError, OverflowError):
        raise _refused(where, value, kind) from None


def _read(where: str, text: str, kind: Any) -> Any:
    if text in ("None", "null") and NoneType in get_args(kind):
        return None
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        pass
    try:  # lists and the like
        return msgspec.json.decode(text.encode(), type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeError):
        raise _refused(where, text, kind) from None


def _refused(where: str, value: object, kind: Any) -> DefinitionError:
    expected = str(kind).replace("typing.", "")
    if isinstance(kind, type):
        expected = kind.__name__
    for member_type in (kind, *get_args(kind)):
        if member_type is bool:
            expected += " (true or false)"
        elif isinstance(member_type, type) and issubclass(member_type, Enum):
            values = [repr(member.value) for member in member_type]
            expected += f" ({' or '.join(values)})"
    return DefinitionError(f"{where} cannot be {value!r:.200}; expected {expected}.")


def _recorded(where: str, name: str, value: Any) -> Any:
    """The value as JSON has it, without secrets."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        return without_secrets(name, msgspec.json.decode(msgspec.json.encode(value)))
    except (msgspec.MsgspecError, OverflowError, UnicodeError) as error:
        raise DefinitionError(f"{where} cannot be recorded: {error}.") from None


def without_secrets(name: str, value: Any) -> Any:
    """A value of JSON, without the secrets in it and the credentials in URLs."""
    if value and isinstance(value, str | list | dict) and _SECRET.fullmatch(name):
        return HIDDEN
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, list):
        return [without_secrets("", item) for item in value]
    if isinstance(value, dict):
        return {without_credentials(key): without_secrets(key, item) for key, item in value.items()}
    return value
