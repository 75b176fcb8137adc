"""Find the nodes and blobs of a job in a checkpoint that may have others. Reads, never writes.

What the user says of a job that has changed is an `Adaptation`. The records of a run name the
renames and the migration that it was given, or that were given before: in those checkpoints they are
done, and mean nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobrunner.checkpoint import (
    Checkpoint,
    Details,
    EpochRecord,
    Loader,
    Origins,
)
from jobrunner.compile import Plan
from jobrunner.define import Job, check_call, without_partials
from jobrunner.errors import DefinitionError, PlanMismatchError
from jobrunner.names import check_name
from jobrunner.positions import Position
from jobrunner.texts import listed

Key = tuple[str, str]
"""Node and blob."""

Blobs = Mapping[str, Collection[str]]
"""Node -> names of blobs."""

Missing = Literal["error", "init"]

Migration = Callable[[Checkpoint], Mapping[str, Mapping[str, Any]]]

START_AFRESH = "start afresh (resume_from_epoch=None, --resume none)"

_EVERY = "*"  # in place of a node
_MOST_NAMES = 8  # in a message


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How a job has changed since its checkpoint; see `JobRunner`."""

    rename: Mapping[str, str] = field(default_factory=dict)
    missing: Missing = "error"
    migrate: Migration | None = None

    def lineage(self, plan: Plan, details: Details) -> dict[str, Any]:
        """What later records say of nodes and changes; `details` are those of the one loaded."""
        before: Mapping[str, str] = details.renamed
        renamed = {o: n for o, n in before.items() if self.rename.get(n) != o} | dict(self.rename)
        migrated = list(details.migrated)
        if (name := self.migration) and name not in migrated:
            migrated.append(name)
        return {
            **({"uids": uids} if (uids := plan.uids()) else {}),
            **({"renamed": renamed} if renamed else {}),
            **({"migrated": migrated} if migrated else {}),
        }

    def check_start(self, plan: Plan) -> None:
        """Raise `PlanMismatchError` if a run without a checkpoint would record a wrong rename."""
        last = {old: new for old, new in self.rename.items() if new not in self.rename}
        _check_new_names(plan, last, plan.saved_blobs(Position(1)))

    @property
    def migration(self) -> str:
        """The name of `migrate`, as records have it; empty if there is none."""
        if self.migrate is None:
            return ""
        fn = without_partials(self.migrate)
        return str(getattr(fn, "__qualname__", type(fn).__qualname__))

    def migrates(self, record: EpochRecord) -> bool:
        """Whether `migrate` is to be called for a checkpoint."""
        return bool(self.migration) and self.migration not in record.details.migrated


def adapt(
    rename: Mapping[str, str] | None, missing: Missing, migrate: Migration | None, job: Job
) -> Adaptation:
    """Check these arguments of a `JobRunner`; raises `DefinitionError`."""
    where = f"JobRunner of job {job.name!r}"
    if migrate is not None:
        check_call(migrate, 1, (), f"{where}: migrate")
    return Adaptation(_read_rename(rename or {}, where), missing, migrate)


def _read_rename(rename: Mapping[str, str], where: str) -> dict[str, str]:
    for old, new in rename.items():
        (old_node, *old_blob), (new_node, *new_blob) = old.split("/", 1), new.split("/", 1)
        is_pair = len(old_blob) == len(new_blob)
        if not is_pair or (old_node == _EVERY) != (new_node == _EVERY):
            raise DefinitionError(
                f"{where}: rename maps nodes to nodes ('old': 'new'), and blobs to blobs "
                f"('node/old': 'node/new', or '*/old': '*/new' on every node); got {old!r}: {new!r}."
            )
        for blob in (*old_blob, *new_blob):
            check_name(blob, "blob")
        for node in (old_node, new_node):
            check_name(node, "node")
    changed = {old: new for old, new in rename.items() if old != new}
    for new in changed.values():
        if len(same := [old for old, its in changed.items() if its == new]) > 1:
            raise DefinitionError(
                f"{where}: rename gives {same[0]!r} and {same[1]!r} the same name, {new!r}. Name one "
                f"of them."
            )
    return changed


@dataclass(frozen=True, slots=True)
class Match:
    """Which blobs of a checkpoint a job loads, from where, and what it makes anew."""

    blobs: dict[str, frozenset[str]]
    """Node -> the blobs to load."""
    origins: Origins
    made: dict[str, frozenset[str]]
    """Node -> the blobs that the checkpoint lacks and that init tasks make."""
    lacking: tuple[str, ...]
    """The other blobs that it lacks, in words."""
    renamed: tuple[str, ...]
    """What has another name now, in words."""
    dropped: tuple[str, ...]
    """What the job does not load, in words."""
    is_reshaped: bool
    """`rename`, `missing` or `migrate` has an effect."""

    def describe(self) -> str:
        """What the user should know of it; empty if the checkpoint has all that the job has."""
        parts = [f"{what} is loaded" for what in self.renamed]
        parts += [f"{what} is made" for what in self.describe_made()]
        parts += [f"{what} is not loaded" for what in self.dropped]
        return listed(parts, _MOST_NAMES, "; ") if parts else ""

    def rename(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """The description of the plan that wrote the checkpoint, with the names of `now`."""
        nodes = {old: node for node, old in self.origins.nodes.items() if node != old}
        blobs = {(old, then): name for (_, name), (old, then) in self.origins.blobs.items()}

        def is_replaced(node: str) -> bool:
            return node not in nodes and node in nodes.values()

        def named(digests: Mapping[str, str]) -> dict[str, str]:
            found = {}
            for task, digest in digests.items():
                group, _, rest = task.partition(":")
                node, _, name = rest.partition("/")
                if not is_replaced(node):
                    found[f"{group}:{nodes.get(node, node)}/{name}"] = digest
            return found

        structure = named(then.get("structure", {}))
        for task in structure:  # the digests contain names of nodes
            if task.partition(":")[2].partition("/")[0] in nodes.values():
                structure[task] = now["structure"].get(task, structure[task])
        return {
            **then,
            "nodes": {
                nodes.get(node, node): [blobs.get((node, name), name) for name in names]
                for node, names in then.get("nodes", {}).items()
                if not is_replaced(node)
            },
            "structure": structure,
            "code": named(then.get("code", {})),
        }

    def describe_made(self, migrates: bool = False) -> list[str]:
        """The blobs that the checkpoint lacks, in words, with what else than an init task makes them."""
        made = [_name_blob(node, name) for node, its in self.made.items() for name in sorted(its)]
        by = "migrate" if migrates else "the next epoch"
        return [*made, *(f"{what} by {by}" for what in self.lacking)]


@dataclass(frozen=True, slots=True)
class NamesNow:
    """What the nodes and blobs of a checkpoint are called now."""

    renamed: dict[str, str]
    """The renames that this checkpoint needs."""
    nodes: dict[str, str]
    """Node -> the recorded node that it was."""
    blobs: dict[Key, Key]
    """Node and blob -> the recorded ones."""

    @property
    def every(self) -> dict[str, str]:
        """Blob -> its recorded name, if it was renamed on every node."""
        return {_key(new)[1]: _key(o)[1] for o, new in self.renamed.items() if _key(o)[0] == _EVERY}

    def origins(self, wanted: Blobs, shared: Mapping[str, str] | None = None) -> Origins:
        """Where the blobs to load are; `shared` as in `Origins`."""
        shared = shared or {}
        moved: dict[Key, Key] = {}
        for node, names in wanted.items():
            for name in names:
                found = self.blobs.get((node, name))
                if found not in (None, (self.nodes.get(node), shared.get(name, name))):
                    moved[node, name] = found
        return Origins(
            {node: self.nodes[node] for node in wanted if node in self.nodes}, moved, shared
        )


def name_now(
    rename: Mapping[str, str],
    uids: Mapping[str, str],
    names: Collection[str],
    path: str,
    record: EpochRecord,
    there: Blobs,
) -> NamesNow:
    """Name the nodes and blobs of a checkpoint as a job with nodes `names`, some with `uids`, does.

    It is in the directory `path`; `there` are its blobs under their recorded names.

    Renames come first, then uids, then equal names. Raises `PlanMismatchError` if a rename names
    nothing that is recorded.
    """
    done, then_uids = record.details.renamed, record.details.uids
    renamed = {old: new for old, new in rename.items() if done.get(old) != new}
    for old, new in renamed.items():
        if not _is_there(old, there):
            node, blob = _key(old)
            lacks = _name_blob(node, blob) if blob else f"node {node!r}"
            found = listed(map(repr, there.get(node, there)))
            raise PlanMismatchError(
                f"rename={{{old!r}: {new!r}}}: epoch {record.at} of {path} has no {lacks}. Its "
                f"{'blobs' if node in there else 'nodes'} are {found}. Correct or omit it."
            )
    nodes = {new: old for old, new in renamed.items() if "/" not in old}
    left = dict.fromkeys(old for old in there if old not in renamed)
    owners = {uids.get(name, name): name for name in names}
    for old in list(left):
        name = owners.get(then_uids.get(old, old))
        if name is not None and nodes.setdefault(name, old) == old:
            del left[old]
    for old in left:
        if old not in then_uids or old not in uids:  # else it is another node
            nodes.setdefault(old, old)
    blobs = {_key(new): _key(old) for old, new in renamed.items() if "/" in old}
    now = NamesNow(renamed, nodes, {key: old for key, old in blobs.items() if key[0] != _EVERY})
    taken, names_now = set(now.blobs.values()), {then: name for name, then in now.every.items()}
    for is_renamed in (True, False):
        for node, old in nodes.items():
            for then in there[old]:
                if (then in names_now) == is_renamed and (old, then) not in taken:
                    now.blobs.setdefault((node, names_now.get(then, then)), (old, then))
    return now


def match(
    plan: Plan,
    manager: Loader,
    record: EpochRecord,
    adaptation: Adaptation,
    given: Blobs | None = None,
) -> Match:
    """Find the blobs that `plan` needs in a checkpoint; `given` are those that `migrate` returned.

    With `given` None, `migrate` may return all that is missing. Raises `PlanMismatchError` if blobs
    are missing that nothing makes, or if a rename does not fit.
    """
    epoch, there = record.at, manager.blobs(record)
    needed = plan.saved_blobs(epoch)
    now = name_now(adaptation.rename, plan.uids(), needed, manager.path, record, there)
    _check_new_names(plan, now.renamed, needed)
    every, shared = now.every, {}
    for names, recorded in (
        (plan.replicated, record.details.replicated),
        (plan.partitions, record.details.partitions),
    ):
        for name in names:
            then = every.get(name, name)
            if then in recorded and (name in every or then not in every.values()):
                shared[name] = then
    blobs: dict[str, frozenset[str]] = {}
    missing: dict[str, frozenset[str]] = {}
    words: list[str] = []  # what is missing
    used = {(node, then) for then in shared.values() for node in there if then in there[node]}
    for node, all_names in needed.items():
        asked = all_names.difference((given or {}).get(node, ()))
        found = {name for name in asked if name in shared or (node, name) in now.blobs}
        used |= {now.blobs[node, it] for it in found | all_names - asked if (node, it) in now.blobs}
        if node in now.nodes or found:
            blobs[node] = frozenset(found)
        if lacks := asked - found:
            missing[node] = lacks
        if node in now.nodes:
            words += [_name_blob(node, name) for name in sorted(lacks)]
        elif lacks or not all_names:
            words.append(f"node {node!r}")
    migrates = adaptation.migrates(record)
    if words and adaptation.missing == "error" and not (migrates and given is None):
        taken = "".join(
            f" rename={{{old!r}: {new!r}}} is no help: the checkpoint also has a {new!r} of its own."
            for old, new in now.renamed.items()
            if new not in now.renamed and _is_there(new, there)
        )
        raise PlanMismatchError(
            f"Job {plan.job!r} cannot resume from epoch {epoch} of {manager.path}, which lacks "
            f"{listed(words, _MOST_NAMES)}; its nodes are {listed(map(repr, there))}.{taken} Say under which "
            f"names it has them (rename=..., --rename OLD=NEW), let init tasks make them "
            f"(missing='init', --missing init) or a function (migrate=..., --migrate NAME), run the "
            f"job that wrote it, or {START_AFRESH}."
        )
    made: dict[str, frozenset[str]] = {}
    if adaptation.missing == "init":
        made = {
            node: its
            for node, names in missing.items()
            if (its := names & plan.initial.get(node, frozenset()))
        }
    origins = now.origins(
        {node: {*blobs.get(node, ()), *(given or {}).get(node, ())} for node in needed}, shared
    )
    return Match(
        blobs,
        origins,
        made,
        tuple(
            _name_blob(node, name)
            for node, names in missing.items()
            for name in sorted(names.difference(made.get(node, ())))
        ),
        tuple(_describe_renamed(now, origins)),
        tuple(_describe_dropped(there, used, {now.nodes.get(node) for node in needed})),
        bool(now.renamed or made or migrates),
    )


def _check_new_names(plan: Plan, rename: Mapping[str, str], needed: Blobs) -> None:
    """Raise `PlanMismatchError` if a new name is none of `needed`."""
    for old, new in rename.items():
        if not _is_there(new, needed):
            raise PlanMismatchError(
                f"rename={{{old!r}: {new!r}}}: job {plan.job!r} saves no {new!r}. Its nodes are "
                f"{listed(map(repr, needed))}. Correct or omit it."
            )


def _is_there(name: str, there: Blobs) -> bool:
    node, blob = _key(name)
    if not blob:
        return node in there
    return any(blob in names for its, names in there.items() if node in (_EVERY, its))


def _key(name: str) -> Key:
    node, _, blob = name.partition("/")
    return node, blob


def _name_blob(node: str, name: str) -> str:
    return f"blob {name!r} of node {node!r}"


def _describe_renamed(now: NamesNow, origins: Origins) -> Iterator[str]:
    for node, old in origins.nodes.items():
        if node != old:
            yield f"node {old!r} as {node!r}"
    for name, then in now.every.items():
        yield f"blob {then!r} of every node as {name!r}"
    for (node, name), (old, then) in origins.blobs.items():
        if now.every.get(name) != then:
            yield f"{_name_blob(old, then)} as {_name_blob(node, name)}"


def _describe_dropped(there: Blobs, used: set[Key], nodes: Collection[str | None]) -> Iterator[str]:
    for node, names in there.items():
        left = [name for name in names if (node, name) not in used]
        if len(left) == len(names) and node not in nodes:
            yield f"node {node!r}" + (f" ({', '.join(map(repr, left))})" if left else "")
        else:
            yield from (_name_blob(node, name) for name in left)
