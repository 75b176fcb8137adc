"""Checks that the client and every worker see the same directory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobrunner.checkpoint.storage import Files
from jobrunner.errors import CheckpointError, CheckpointWriteError

_QUESTION = "probe"
_ADVICE = "Use a directory that the client and all workers share."


class ProbeAnswer(NamedTuple):
    """What a worker read and wrote."""

    saw: bytes | None = None  # content of the client's file
    wrote: str | None = None  # name of the worker's file
    error: str | None = None  # why it could not read or write


@dataclass(frozen=True, slots=True)
class Probe:
    """Reads the client's file and writes another; called once on each worker, in a thread.

    Picklable. Returns failures instead of raising.
    """

    files: Files
    directory: str  # the run's, in the checkpoint directory
    token: bytes  # content of both files, which no other run has

    def ask(self) -> None:
        """Write the client's file; called on the client."""
        self.files.overwrite(os.path.join(self.directory, _QUESTION), self.token)

    def __call__(self, workspaces: Mapping[str, Any]) -> ProbeAnswer:
        """Read the client's file and write the worker's."""
        try:
            saw = self.files.read_if_there(os.path.join(self.directory, _QUESTION))
            if saw != self.token:
                return ProbeAnswer(saw=saw)
            name = f"answer-{uuid.uuid4().hex}"
            self.files.write(os.path.join(self.directory, name), [self.token])
        except OSError as error:
            return ProbeAnswer(saw=self.token, error=f"{type(error).__name__}: {error}")
        return ProbeAnswer(saw=saw, wrote=name)

    def check(self, path: str, answers: Mapping[str, Any]) -> None:
        """Read the workers' files; called on the client with answers by the workers' addresses.

        Raises
        ------
        CheckpointError
            A worker sees another directory under `path`, the checkpoint directory.
        CheckpointWriteError
            A worker cannot write there, or its file cannot be read.
        """
        names = [answer.wrote for answer in answers.values() if answer.wrote is not None]
        try:
            paths = [os.path.join(self.directory, name) for name in names]
            written = dict(
                zip(names, self.files.each(self.files.read_if_there, paths), strict=True)
            )
        except OSError as error:
            raise CheckpointWriteError(
                f"{path}: cannot read the workers' files: {type(error).__name__}: {error}. Repair "
                f"the storage and run again."
            ) from error
        for worker, answer in answers.items():
            if answer.error is not None:
                raise CheckpointWriteError(
                    f"Worker {worker} cannot use the checkpoint directory {path}: "
                    f"{answer.error}. Its user needs permission to read and write there."
                )
            if answer.wrote is None:
                found = "nothing" if answer.saw is None else "something else"
                raise CheckpointError(
                    f"{path} is not shared: expected worker {worker} to find the client's file "
                    f"there, but it found {found}. {_ADVICE}"
                )
            if written[answer.wrote] != self.token:
                raise CheckpointError(
                    f"{path} is not shared: expected to find the file of worker {worker} there, "
                    f"but found nothing. {_ADVICE}"
                )
