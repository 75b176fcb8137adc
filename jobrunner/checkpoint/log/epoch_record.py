"""What the log says of a recorded epoch, as readers get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobrunner.checkpoint.log.details import Details
from jobrunner.checkpoint.log.entries import NodeContents, Store
from jobrunner.positions import Position, PublicPosition, name_step


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A recorded epoch, or a position within one.

    Attributes
    ----------
    at : Position
        What it contains.
    number : int
        Of the log entry that recorded it.
    time : str
        When it was recorded, in ISO 8601, UTC.
    run : str
        The name of the run that recorded it.
    run_number : int or None
        Of the log entry with which that run began; None if it is unknown.
    stores : mapping of str to Store
        Node -> ``name``, ``sha256`` (of its document), ``nbytes`` and ``seconds``.
    contents : mapping of str to NodeContents
        Node -> the ``blobs`` of its store; those with objects saved by their state (``states``);
        the job's ``classes`` in each; and the length of each part of a partitioned array (``parts``).
        None: the entry that said so is lost, and only the stores know.
    details : Details
        What the run said of it: ``metrics``, ``metadata``, ``stopped_by`` and more.
    """

    at: Position
    number: int
    time: str
    run: str
    run_number: int | None
    stores: Mapping[str, Store]
    contents: Mapping[str, NodeContents] | None
    details: Details

    @property
    def epoch(self) -> PublicPosition:
        """An int after a whole epoch, else a `Position`."""
        return self.at.public

    @property
    def nbytes(self) -> int:
        """The size of all stores."""
        return sum(store.nbytes for store in self.stores.values())

    @property
    def seconds(self) -> float:
        """How long the save took. Nodes save at the same time, so the slowest one counts."""
        return max((store.seconds for store in self.stores.values()), default=0.0)

    @property
    def name(self) -> str:
        """The epoch, and the step if it was saved within one, for a message."""
        at = self.at
        if not at.step:
            return f"epoch {at}"
        noun = "epoch" if at.epoch == 1 else "epochs"
        step = name_step(at.step, self.details.steps_per_epoch)
        return f"epoch {at} ({at.epoch} whole {noun} and {step})"
