"""What the saved states of our readers have in common. A state may come from a stranger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from msgspec import Meta, Struct, ValidationError, convert, json

from jobrunner.errors import PlanMismatchError

SavedInt = Annotated[int, Meta(ge=0, le=1 << 53)]


class SavedReader(Struct, kw_only=True, forbid_unknown_fields=True, rename={"number": "pass"}):
    """A `state_dict`."""

    number: SavedInt  # of the pass

    @classmethod
    def read(cls, state: object, where: str = "the state") -> Self:
        """Raises `PlanMismatchError` if it has other fields, or values of other types."""
        try:
            return convert(state, cls)
        except ValidationError as error:
            raise PlanMismatchError(
                f"{where} is not one of this reader: {error}; found {state!r:.300}. Load a state that "
                f"a reader of the same kind has made."
            ) from None

    def write(self) -> dict[str, Any]:
        """The same as plain values."""
        plain: dict[str, Any] = json.decode(json.encode(self))
        return plain


class SavedShard(SavedReader, kw_only=True):
    """A `state_dict` of a shard i of n, or of the whole (None)."""

    shard: tuple[SavedInt, SavedInt] | None

    @classmethod
    def read_own(cls, state: object, own: tuple[int, int]) -> Self:
        """Raises `PlanMismatchError` if it is of another shard."""
        saved = cls.read(state)
        if saved.shard not in (None, own):
            raise PlanMismatchError(
                f"the state, field 'shard': expected {own}, found {saved.shard}. If the number of nodes "
                f"has changed, name the blob Blob(..., partition=0), or pass the states of all shards "
                f"to merge_state_dicts."
            )
        return saved

    @classmethod
    def read_all(cls, states: Sequence[object]) -> list[Self]:
        """Raises `PlanMismatchError` if they are not those of all shards, in any order."""
        saved = [cls.read(state, f"state {i} of {len(states)}") for i, state in enumerate(states)]
        shards = [state.shard for state in saved]
        n = len(saved)
        if n == 0 or set(shards) != {(i, n) for i in range(n)}:
            raise PlanMismatchError(
                f"The states to merge, field 'shard': expected one of each shard (i, n), found "
                f"{shards!r:.200}."
            )
        return saved
