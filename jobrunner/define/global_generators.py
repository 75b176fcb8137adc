"""The global random generators of this process: Python's, NumPy's and PyTorch's."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from jobrunner.define.arguments import NATURAL, checked

_TURN = threading.RLock()
"""Held by the one call in this process that draws from generators with a state of its own."""


@contextmanager
def seeded_generators(key: bytes) -> Iterator[None]:
    """Seed the global generators; afterwards they are as they were before."""
    with _TURN:
        before = _captured()
        try:
            _seed(key)
            yield
        finally:
            _restore(before)


@checked(seed=NATURAL)
class GlobalRNG:
    """The global random generators, as a blob: their streams go on from epoch to epoch.

    ``with rng:`` in a task's function, the global generators of Python (`random`), NumPy
    (`numpy.random`) and PyTorch, if that is installed, also on CUDA, continue where the last such
    block ended. Afterwards they are as they were before it. Their states are saved, so the streams
    of a resumed run go on as if it had never stopped.

    Parameters
    ----------
    seed : int
        Where the streams begin. Give each node another one.

    Notes
    -----
    Each node needs one of its own: an init task makes it, and tasks that draw name it in
    ``updates=``, so that they run one after another. A process has one set of global generators:
    such blocks, and calls of `seeded` functions, take turns in each worker process. Another task that
    draws from them at the same time without either disturbs them, and so do threads that the block
    starts.

    Examples
    --------
    >>> rng = GlobalRNG(7)
    >>> with rng:
    ...     first = random.random()
    >>> with rng:
    ...     second = random.random()  # the next of the same stream
    """

    def __init__(self, seed: int = 0) -> None:
        with seeded_generators(np.random.SeedSequence(seed).generate_state(8).tobytes()):
            self._states = _captured()
        self._before: dict[str, Any] | None = None
        self._depth = 0  # of blocks within each other, which go on with one stream

    def __enter__(self) -> None:
        _TURN.acquire()
        try:
            if self._depth == 0:
                self._before = _replaced(self._states)
        except BaseException:
            _TURN.release()
            raise
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._depth -= 1
            if self._depth == 0 and self._before is not None:
                self._states = _captured(self._states["cuda"])
                _restore(self._before)
        finally:
            _TURN.release()

    def state_dict(self) -> dict[str, Any]:
        """The states, as arrays and numbers, where the last ``with`` block ended."""
        return self._states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved states; raises an error, and changes nothing, if they are none."""
        with _TURN:
            own = {name: state[name] for name in self._states}
            _restore(_replaced(own))
            self._states = own


def _replaced(states: Mapping[str, Any]) -> dict[str, Any]:
    """Restore states; return those of before, which stay if it fails."""
    before = _captured()
    try:
        _restore(states)
    except BaseException:
        _restore(before)
        raise
    return before


def _captured(cuda: Sequence[Any] = ()) -> dict[str, Any]:
    """The states; `cuda`: those of a stream that goes on where there is no CUDA."""
    _, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": np.array(internal, np.uint32),
        "gauss": gauss,
        "numpy": np.random.get_state(legacy=False),
        "torch": None,
        "cuda": list(cuda),
    }
    if (torch := _torch()) is not None:
        states["torch"] = torch.get_rng_state().numpy().copy()
        if torch.cuda.is_initialized():
            states["cuda"] = [each.numpy().copy() for each in torch.cuda.get_rng_state_all()]
    return states


def _restore(states: Mapping[str, Any]) -> None:
    random.setstate((3, tuple(states["python"].tolist()), states["gauss"]))
    np.random.set_state(states["numpy"])
    torch = _torch()
    if torch is not None and states["torch"] is not None:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
        if _has_cuda():
            _restore_cuda(torch, states["cuda"])


def _restore_cuda(torch: Any, states: Sequence[Any]) -> None:
    if not states:  # CUDA was not in use: its stream begins with the seed of the CPU's
        torch.cuda.manual_seed_all(torch.initial_seed())
        return
    torch.cuda.init()  # which would seed it anew if it came later
    own = states[: torch.cuda.device_count()]
    torch.cuda.set_rng_state_all([torch.from_numpy(each.copy()) for each in own])


def _seed(key: bytes) -> None:
    random.seed(key)
    np.random.seed(np.frombuffer(key, "<u4"))
    if (torch := _torch()) is not None:
        torch.default_generator.manual_seed(int.from_bytes(key[:8], "little"))
        if _has_cuda():
            torch.cuda.manual_seed_all(int.from_bytes(key[:8], "little"))


@functools.cache
def _torch() -> Any:
    # Also if no task has imported it yet: a task that does so while it runs finds it seeded.
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


@functools.cache
def _has_cuda() -> bool:
    return bool(_torch().cuda.is_available())
