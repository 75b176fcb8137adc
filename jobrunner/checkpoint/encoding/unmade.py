"""What stands for a value that is not made. Runs no code of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Unmade:
    """Stands for a value that this process cannot make, or that an outline does not make.

    Parameters
    ----------
    kind : str
        Its type: the name of a kind of ours or of a library's class; "codec" and the name of a
        user's codec; module and qualified name of a class
        that this process does not have, joined by a colon; or "pickle".
    parts : object
        What it is made of: its fields, its arrays or stand-ins for them, the size of a pickle.
    """

    kind: str
    parts: Any

    def __repr__(self) -> str:
        name = self.kind.removeprefix("codec ")
        return f"{name}({self.parts!r})"
