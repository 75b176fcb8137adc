"""What the log's entries mean: folded one after another, they give the state. Pure: no I/O.

==========  ==========================================================================
kind        says
==========  ==========================================================================
``run``     a run has taken the directory; whoever held it before must not write
``begin``   the stores' names of an epoch are claimed, for this attempt to save it
``commit``  the epoch exists: these are its stores and their manifests' digests
``rewind``  epochs after one, or a single one, are set aside
``retire``  epochs are given up, by the retention policy; those that are pinned stay
``pin``     an epoch is kept, under a label, whatever the retention policy says
``unpin``   a label of an epoch is taken away again
``done``    the job ended after this epoch, exit group and all
``end``     the run has left; another may take the directory at once
``state``   all of the above so far, so that a reader can start here
``repair``  what could be proven where entries were lost; a reader starts again here
``gap``     an entry was lost that had this number, which nobody may use again
==========  ==========================================================================

Whoever is not the run that holds the directory may append ``pin`` and ``unpin``, and nothing else;
a ``repair`` needs a directory that nobody holds.
Any entry may say which stores are ``settled``: removed or renamed, with nothing left to do.
"""

from __future__ import annotations

import datetime as dt
import math
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jobrunner.checkpoint.log.epoch_map import EpochMap
from jobrunner.checkpoint.store import FORMAT
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import format_store_name

Entry = Mapping[str, Any]
"""JSON: ``format``, ``number``, ``kind``, ``run``, ``id``, ``time`` and what the kind needs."""

OPEN_KINDS = ("run", "state", "pin", "unpin", "repair")
"""What another than the run that holds the directory may append."""

RESTARTS = ("state", "repair")
"""Where a reader can start, whatever became of the entries before."""

STATE_INTERVAL = 128
"""The entries whose number is a multiple of it (but not 0) are ``state`` entries."""


def make_entry(number: int, kind: str, run: str, body: Mapping[str, Any]) -> Entry:
    """An entry ready to be appended; its ``id`` is like no other's."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return {
        "format": FORMAT,
        "number": number,
        "kind": kind,
        "run": run,
        "id": uuid.uuid4().hex,
        "time": now,
        **body,
    }


class Claim(NamedTuple):
    """The names of one attempt to save an epoch."""

    epoch: int
    retry: int


def moment_of(directory: str, claim: Claim) -> str:
    """What workers call the states of a claimed epoch that they keep in memory."""
    return f"{directory} {claim.epoch}.{claim.retry}"


@dataclass(frozen=True, slots=True)
class Chore:
    """Stores that are not, or no longer, part of a checkpoint and may still lie there.

    Attributes
    ----------
    action : "delete" or "hide"
        Hidden stores stay, but no longer open as if they were live.
    source : int
        Number of the entry that names the nodes: a ``run`` or a ``commit``.
    """

    action: Literal["delete", "hide"]
    source: int


@dataclass(slots=True)
class State:
    """What the log says up to entry `number`.

    Attributes
    ----------
    number : int
        Of the last entry; -1 for an empty log.
    run : Entry or None
        The last ``run`` entry, but for ``nodes`` and ``info``.
    is_ended : bool
        Whether that run has left.
    recorded : EpochMap
        Epoch -> place of its ``commit`` entry among those that are no full states, so that epochs
        that were saved one after another take no room of their own; see `commit_number`.
    retries : EpochMap
        Recorded epoch -> which claim on its names it is.
    claims : EpochMap
        Epoch -> how often its names were claimed.
    chores : dict of Claim to Chore
        What nobody has said to be settled, saves in progress included.
    done : int or None
        The epoch after which the job ended.
    pins : dict of int to tuple of str
        Recorded epoch -> the labels that it is pinned under.
    """

    number: int = -1
    run: Entry | None = None
    is_ended: bool = True
    recorded: EpochMap = field(default_factory=EpochMap)
    retries: EpochMap = field(default_factory=EpochMap)
    claims: EpochMap = field(default_factory=EpochMap)
    chores: dict[Claim, Chore] = field(default_factory=dict)
    done: int | None = None
    pins: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def latest(self) -> int | None:
        """The newest recorded epoch."""
        return self.recorded.keys_in_order()[-1] if self.recorded else None

    def commit_number(self, epoch: int) -> int:
        """Number of the ``commit`` entry of a recorded epoch."""
        place = self.recorded[epoch]
        return place + max(0, place - 1) // (STATE_INTERVAL - 1)

    def after(self, entry: Entry) -> State:
        """What the log would say with `entry` at its end; this state stays as it is."""
        state = State.from_json(self.to_json())
        state.number = self.number
        state.apply(entry)
        return state

    def apply(self, entry: Entry) -> None:
        """Take in the next entry.

        Raises
        ------
        CheckpointCorruptError
            It cannot follow on what came before.
        """
        number, kind = entry["number"], entry["kind"]
        if entry["format"] > FORMAT:
            raise CheckpointCorruptError(
                f"Entry {number} of the log has format {entry['format']}, and this version of "
                f"jobrunner reads up to {FORMAT}. Use a later version."
            )
        starts_here = kind == "repair" or (kind == "state" and self.number == -1)
        if number != self.number + 1 and not starts_here:
            raise CheckpointCorruptError(
                f"The log has entry {number} where entry {self.number + 1} is expected."
            )
        if kind == "gap":
            raise CheckpointCorruptError(f"Entry {number} of the log was lost.")
        holder = self.run["run"] if self.run is not None else None
        if kind not in OPEN_KINDS and entry["run"] != holder:
            raise CheckpointCorruptError(
                f"Entry {number} ({kind}) of the log is by run {entry['run']}, and run {holder} "
                f"holds the directory at that point. The metadata handler let a run write that "
                f"was taken over: try it with jobrunner.testing.contracts."
            )
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise CheckpointCorruptError(
                f"Entry {number} of the log is of kind {kind!r}, which this version of jobrunner "
                f"does not know. Use a later version."
            )
        try:
            handler(self, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(
                f"Entry {number} ({kind}) of the log lacks or misstates what such an entry "
                f"says: {type(error).__name__}: {error}."
            ) from error
        for epoch, retry in entry.get("settled", ()):
            self.chores.pop(Claim(epoch, retry), None)
        self.number = number

    def restart(self, entry: Entry) -> None:
        """Begin again at a full state or a repair, whatever came before."""
        found = State()
        found.apply(entry)
        for name in (*_SUMMED_UP, "number"):
            setattr(self, name, getattr(found, name))

    # --- one method a kind

    def _run(self, entry: Entry) -> None:
        entry["nodes"]
        # What can be long is read again from the log where it is needed.
        self.run = {key: entry[key] for key in entry if key not in _LONG}
        self.is_ended = False

    def _begin(self, entry: Entry) -> None:
        epoch, retry = entry["epoch"], entry["retry"]
        if retry < self.claims.get(epoch, 0):
            raise ValueError(f"the claim {retry} on epoch {epoch} was made before")
        self.claims[epoch] = retry + 1
        if self.run is None:
            raise ValueError("no run holds the directory")
        self.chores[Claim(epoch, retry)] = Chore("delete", self.run["number"])

    def _commit(self, entry: Entry) -> None:
        epoch, retry = entry["epoch"], entry["retry"]
        if Claim(epoch, retry) not in self.chores:
            raise ValueError(f"the claim {retry} on epoch {epoch} was never made")
        entry["stores"]
        if epoch in self.recorded:
            # Somebody counts on what is pinned: it goes out of sight, and stays.
            self._give_up(epoch, "hide" if epoch in self.pins else "delete")
        del self.chores[Claim(epoch, retry)]
        self.recorded[epoch] = _place(entry["number"])
        self.retries[epoch] = retry
        self.done = None

    def _rewind(self, entry: Entry) -> None:
        if "only" in entry:
            epochs = [entry["only"]]
        else:
            after = -1 if entry["after"] is None else entry["after"]
            epochs = [epoch for epoch in self.recorded if epoch > after]
        for epoch in epochs:
            self._give_up(epoch, "hide")

    def _retire(self, entry: Entry) -> None:
        for epoch in entry["epochs"]:
            # It may have been pinned after the policy had chosen it: the order of entries decides.
            if epoch not in self.pins:
                self._give_up(epoch, "delete")

    def _give_up(self, epoch: int, action: Literal["delete", "hide"]) -> None:
        number = self.commit_number(epoch)
        del self.recorded[epoch]
        self.pins.pop(epoch, None)
        self.chores[Claim(epoch, self.retries.pop(epoch))] = Chore(action, number)
        if self.done == epoch:
            self.done = None

    def _done(self, entry: Entry) -> None:
        self.done = entry["epoch"]

    def _end(self, entry: Entry) -> None:
        self.is_ended = True

    def _pin(self, entry: Entry) -> None:
        epoch, label = entry["epoch"], entry["label"]
        if epoch not in self.recorded:
            raise ValueError(f"epoch {epoch} is not recorded")
        self.pins[epoch] = (*(one for one in self.pins.get(epoch, ()) if one != label), label)

    def _unpin(self, entry: Entry) -> None:
        epoch, label = entry["epoch"], entry["label"]
        left = tuple(one for one in self.pins.pop(epoch, ()) if one != label)
        if left and label is not None:
            self.pins[epoch] = left

    def _state(self, entry: Entry) -> None:
        if self.number >= 0:
            return  # it sums up what is known
        found = State.from_json(entry["state"])
        for name in _SUMMED_UP:
            setattr(self, name, getattr(found, name))

    def _repair(self, entry: Entry) -> None:
        found = State.from_json(entry["state"])
        for name in _SUMMED_UP:
            setattr(self, name, getattr(found, name))
        for commit in entry["commits"]:
            epoch = commit["epoch"]
            self.recorded[epoch] = _place(entry["number"])
            self.retries[epoch] = commit["retry"]
        self.run = {key: entry[key] for key in entry if key not in _LONG}
        self.is_ended = True

    def to_json(self) -> dict[str, Any]:
        """The body of a ``state`` entry."""
        return {
            "run": self.run,
            "is_ended": self.is_ended,
            "recorded": self.recorded.runs(),
            "retries": self.retries.runs(),
            "claims": self.claims.runs(),
            "chores": [
                [*claim, chore.action, chore.source] for claim, chore in self.chores.items()
            ],
            "done": self.done,
            "pins": [[epoch, *labels] for epoch, labels in self.pins.items()],
        }

    def says(self, other: State) -> bool:
        """Whether this state and `other` say the same, but for the entry's number."""
        return all(
            dict(mine) == dict(theirs) if isinstance(mine, EpochMap) else mine == theirs
            for mine, theirs in ((getattr(self, n), getattr(other, n)) for n in _SUMMED_UP)
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> State:
        """The state that `to_json` described, with no entry number."""
        return cls(
            run=body["run"],
            is_ended=body["is_ended"],
            recorded=EpochMap(body["recorded"]),
            retries=EpochMap(body["retries"]),
            claims=EpochMap(body["claims"]),
            chores={
                Claim(epoch, retry): Chore(action, source)
                for epoch, retry, action, source in body["chores"]
            },
            done=body["done"],
            # States written before there were pins have none.
            pins={epoch: tuple(labels) for epoch, *labels in body.get("pins", ())},
        )


_SUMMED_UP = ("run", "is_ended", "recorded", "retries", "claims", "chores", "done", "pins")

_LONG = ("nodes", "info", "state", "commits", "lost")
"""What of a ``run`` or ``repair`` is not kept in memory."""

_HANDLERS = {
    "run": State._run,
    "begin": State._begin,
    "commit": State._commit,
    "rewind": State._rewind,
    "retire": State._retire,
    "done": State._done,
    "end": State._end,
    "pin": State._pin,
    "unpin": State._unpin,
    "state": State._state,
    "repair": State._repair,
}


def _place(number: int) -> int:
    """Place of an entry that is no full state among all that are none."""
    return number - number // STATE_INTERVAL


def fold(entries: Iterable[Entry], state: State | None = None) -> State:
    """Take in entries one after another, beginning with an empty log or a ``state`` entry."""
    state = State() if state is None else state
    for entry in entries:
        state.apply(entry)
    return state


def commits_in(entry: Entry) -> list[Entry]:
    """The records of epochs in an entry: the ``commit`` itself, or those a ``repair`` made again."""
    if entry["kind"] == "repair":
        number = entry["number"]
        return [{**commit, "number": number, "kind": "commit"} for commit in entry["commits"]]
    return [entry] if entry["kind"] == "commit" else []


def commit_in(entry: Entry, epoch: int) -> Entry:
    """The record of an epoch in an entry.

    Raises
    ------
    ValueError
        There is none in it.
    """
    for commit in commits_in(entry):
        if commit["epoch"] == epoch:
            return commit
    raise ValueError(f"it is a {entry['kind']} of epoch {entry.get('epoch')}")


def nodes_of(entry: Entry, epoch: int) -> list[str]:
    """The nodes of an epoch's stores, by the ``run`` that claimed or what recorded them."""
    return list(entry["nodes"] if entry["kind"] == "run" else commit_in(entry, epoch)["stores"])


def given_up_by(entry: Entry, epochs: Collection[int]) -> list[int]:
    """Which of some epochs, best a mapping of them, a ``rewind`` or ``retire`` is about."""
    if entry["kind"] == "retire":
        return [epoch for epoch in entry["epochs"] if epoch in epochs]
    if "only" in entry:
        return [entry["only"]] if entry["only"] in epochs else []
    return [epoch for epoch in epochs if entry["after"] is None or epoch > entry["after"]]


def store_names(nodes: Iterable[str], epoch: int, retry: int) -> dict[str, str]:
    """Node -> name of its store, of one claim on an epoch."""
    return {node: format_store_name(node, epoch, retry) for node in nodes}


_OWN_WORDS = {"$float", "$plain"}


def strict_json(value: Any) -> Any:
    """JSON for what may hold NaN and infinities, which JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, Mapping):
        plain = {key: strict_json(item) for key, item in value.items()}
        return {"$plain": plain} if len(plain) == 1 and plain.keys() <= _OWN_WORDS else plain
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


def loose_json(value: Any) -> Any:
    """What `strict_json` was given."""
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        if value.keys() == {"$plain"}:
            value = value["$plain"]
        return {
            key: loose_json(item) if isinstance(item, dict | list) else item
            for key, item in value.items()
        }
    return [loose_json(item) for item in value] if isinstance(value, list) else value
