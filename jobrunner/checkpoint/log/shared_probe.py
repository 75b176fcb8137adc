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


class ProbeAnswer(NamedTuple):
    """What a worker read and wrote.

    Attributes
    ----------
    saw : bytes or None
        What it read from the client's file; None if there was none.
    wrote : str or None
        Name of the file that it wrote.
    error : str or None
        Why it could not read or write.
    """

    saw: bytes | None = None
    wrote: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Reads the client's file and writes another; called once on each worker.

    Parameters
    ----------
    files : Files
    directory : str
        The run's own, within the checkpoint directory.
    token : bytes
        Content of both files.

    Notes
    -----
    Runs on workers, in a thread; picklable. Failures are returned, not raised.
    """

    files: Files
    directory: str
    token: bytes

    @classmethod
    def ask(cls, files: Files, directory: str) -> Probe:
        """Write the client's file; runs on the client."""
        token = uuid.uuid4().hex.encode()
        files.overwrite(os.path.join(directory, _QUESTION), token)
        return cls(files, directory, token)

    def __call__(self, workspaces: Mapping[str, Any]) -> ProbeAnswer:
        """Read and write."""
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
        """Read the workers' files; runs on the client.

        Parameters
        ----------
        path : str
            The checkpoint directory, for messages.
        answers : mapping of str to ProbeAnswer
            By the worker's address.

        Raises
        ------
        CheckpointError
            A worker sees another directory under that path.
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
                f"{path}: the workers' files could not be read: {type(error).__name__}: {error}. "
                f"Repair the storage and run again."
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
                    f"there, but it found {found}. Use a directory that the client and all workers "
                    f"have in common."
                )
            if written[answer.wrote] != self.token:
                raise CheckpointError(
                    f"{path} is not shared: expected to find what worker {worker} wrote there, "
                    f"but found nothing. Use a directory that the client and all workers have in "
                    f"common."
                )
