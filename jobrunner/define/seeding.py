"""The global random generators of this process: Python's, NumPy's and PyTorch's."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.define.checks import without_partials
from jobrunner.errors import DefinitionError
from jobrunner.texts import clip, show

_TURN = threading.RLock()
"""Held by the one call in this process whose generators are seeded."""


@contextmanager
def seeded_generators(key: bytes) -> Iterator[None]:
    """Seed the global generators with a key of 32 bytes; afterwards they are as they were before."""
    with _TURN:
        before = _States.current()
        try:
            _seed(key)
            yield
        finally:
            before.restore()


@dataclass(frozen=True)
class _States:
    """The states of all global generators."""

    python: Any
    numpy: Any
    torch: Any  # None without PyTorch
    cuda: Any  # None if CUDA is not in use

    @classmethod
    def current(cls) -> _States:
        torch = _torch()
        torch_state = cuda = None
        if torch is not None:
            torch_state = torch.get_rng_state()
            if torch.cuda.is_initialized():
                cuda = torch.cuda.get_rng_state_all()
        return cls(random.getstate(), np.random.get_state(legacy=False), torch_state, cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch = _torch()
        if torch is None:
            return
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        elif _has_cuda():
            # CUDA was not in use before. PyTorch seeds its generators when it first is, which may
            # have been in the call that ends now: without this, its seed would stay.
            torch.cuda.manual_seed_all(torch.initial_seed())


def _seed(key: bytes) -> None:
    random.seed(key)
    np.random.seed(np.frombuffer(key, "<u4"))
    torch = _torch()
    if torch is not None:
        seed = int.from_bytes(key[:8], "little")
        torch.default_generator.manual_seed(seed)
        if _has_cuda():
            torch.cuda.manual_seed_all(seed)


@functools.cache
def _torch() -> Any:
    """PyTorch, if it is installed: a task that imports it while it runs finds it seeded."""
    if importlib.util.find_spec("torch") is None:
        return None
    return importlib.import_module("torch")


@functools.cache
def _has_cuda() -> bool:
    return bool(_torch().cuda.is_available())


def check_seedable(fn: Callable[..., Any], where: str) -> None:
    """Raise `DefinitionError` if `fn` is no function, or one of a generator, which is copied."""
    if not callable(fn):
        raise DefinitionError(f"{where} takes a function; got {clip(show(fn), 200)}.")
    method = without_partials(fn)
    owner = getattr(method, "__self__", None)
    if isinstance(owner, random.Random | np.random.RandomState | np.random.Generator):
        name = getattr(method, "__name__", "draw")
        raise DefinitionError(
            f"{where}: {name} is a method of a generator ({type(owner).__name__}), of which workers "
            f"get a copy that is not seeded. Pass a function that calls it, such as "
            f"`def draw(): return np.random.{name}()`."
        )
