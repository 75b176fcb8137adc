"""Proof that the driver and every worker see the same directory."""

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
    """What a worker saw and did.

    Attributes
    ----------
    saw : bytes or None
        What it read where the driver had written; None: nothing was there.
    wrote : str or None
        Name of the file that it wrote in answer.
    error : str or None
        What kept it from reading or writing.
    """

    saw: bytes | None = None
    wrote: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Reads the driver's question and writes an answer; called once on each worker.

    Parameters
    ----------
    files : Files
    directory : str
        The run's own, within the checkpoint directory.
    token : bytes
        What the driver wrote.

    Notes
    -----
    Runs on workers, in a thread; picklable. Failures are part of the answer.
    """

    files: Files
    directory: str
    token: bytes

    @classmethod
    def ask(cls, files: Files, directory: str) -> Probe:
        """Write the question; runs on the client."""
        token = uuid.uuid4().hex.encode()
        files.overwrite(os.path.join(directory, _QUESTION), token)
        return cls(files, directory, token)

    def __call__(self, workspaces: Mapping[str, Any]) -> ProbeAnswer:
        """Look, and answer."""
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
        """Read all answers back; runs on the client.

        Parameters
        ----------
        path : str
            The checkpoint directory, for messages.
        answers : mapping of str to ProbeAnswer
            By the worker's address.

        Raises
        ------
        CheckpointError
            A worker has another directory under that path.
        CheckpointWriteError
            A worker sees the directory and cannot write there; or what it wrote cannot be read.
        """
        names = [answer.wrote for answer in answers.values() if answer.wrote is not None]
        try:
            paths = [os.path.join(self.directory, name) for name in names]
            written = dict(
                zip(names, self.files.each(self.files.read_if_there, paths), strict=True)
            )
        except OSError as error:
            raise CheckpointWriteError(
                f"{path}: what the workers wrote there could not be read: {type(error).__name__}: "
                f"{error}. Mend the storage and run again."
            ) from error
        for worker, answer in answers.items():
            if answer.error is not None:
                raise CheckpointWriteError(
                    f"Worker {worker} cannot use the checkpoint directory {path}: "
                    f"{answer.error}. Give its user the right to read and write there."
                )
            if answer.wrote is None:
                found = "nothing" if answer.saw is None else "something else"
                raise CheckpointError(
                    f"{path} is not shared: expected worker {worker} to find what the client "
                    f"wrote there, and it found {found}. Give the checkpoint manager a directory "
                    f"that the client and all workers have in common."
                )
            if written[answer.wrote] != self.token:
                raise CheckpointError(
                    f"{path} is not shared: expected to find what worker {worker} wrote there, "
                    f"and found nothing. Give the checkpoint manager a directory that the client "
                    f"and all workers have in common."
                )
