"""After the last epoch: copy the last checkpoint elsewhere, download, exit."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Protocol

from jobrunner.checkpoint import (
    Files,
    MultiNodeCheckpointManager,
    absolute_path,
    files_beside,
    is_url,
    run_all,
)
from jobrunner.define import PATH, Node, Rule, Task, TaskGroup, checked
from jobrunner.errors import CheckpointWriteError, DefinitionError

if TYPE_CHECKING:
    from jobrunner.run.loop import Run


def finish_job(run: Run) -> None:
    """Run the upload, download and exit groups, and record that the job has ended."""
    run.saver.wait()
    epoch = run.state.epoch
    is_recorded = run.state.recorded == epoch
    builder, manager = run.runner.upload_task_group_builder, run.runner.checkpoint_manager
    if builder is not None and not is_recorded:
        run.callbacks.warn(
            f"The last epoch, {epoch}, could not be recorded, so nothing is uploaded. "
            f"Repair the storage. {run.resumption.advice()}"
        )
    elif builder is not None and manager is not None:
        started = time.monotonic()
        run.session.run_group(builder.build(epoch, manager), epoch)
        run.callbacks.notify("on_group", "upload", epoch, time.monotonic() - started)
    for group in ("download", "exit"):
        run.run_group(group, epoch)
    if is_recorded:
        run.saver.finish(epoch)


class UploadTaskGroupBuilder(Protocol):
    """Makes the task group that runs after the last epoch, before the download group."""

    def build(self, epoch: int, manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Make the tasks that copy the stores of `epoch` elsewhere.

        Parameters
        ----------
        epoch : int
            The last recorded epoch.
        manager : MultiNodeCheckpointManager
            ``manager.record(epoch)["stores"]`` names the nodes;
            ``manager.get_ckpt_db_name(node, epoch)`` is the path of a node's store.
        """


BUILDER = Rule(
    "an object with a method build(epoch, manager), such as CopyTo(path)",
    lambda it: callable(getattr(it, "build", None)) and not isinstance(it, type),
)


class CopyTo:
    """Copy each node's store of the last epoch elsewhere, on the node's own worker.

    Parameters
    ----------
    path : str or os.PathLike
        A directory, or its URL, that the workers can write to; created if missing. A store of the
        same name is replaced, and no Zarr reader opens it until the copy is complete and durable,
        also after a power loss.

    Notes
    -----
    Copies two files of a store at a time, or eight if either side is an object store, and reads
    each into memory; a file has at most 64 MiB, and most are smaller.
    """

    @checked(path=PATH)
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute_path(path)

    def check(self, manager: MultiNodeCheckpointManager) -> None:
        """Raise `DefinitionError` if `path` is in the checkpoint directory."""
        if _is_inside(self.path, manager.path):
            raise DefinitionError(
                f"CopyTo({self.path!r}) would copy the stores of {manager.path} into that "
                f"same directory, over themselves. Choose another directory."
            )

    def build(self, epoch: int, manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Make one task for each node of the checkpoint; raises what `check` does."""
        self.check(manager)
        files = manager.recorded.files
        copy = functools.partial(_copy_store, files, files_beside(self.path, files), self.path)
        with TaskGroup() as group:
            for node in manager.record(epoch)["stores"]:
                source = manager.get_ckpt_db_name(node, epoch)
                Task(functools.partial(copy, source), name="copy store", node=Node(node))
        return group


def _is_inside(path: str, directory: str) -> bool:
    if is_url(path) or is_url(directory):
        return f"{path}/".startswith(f"{directory}/")
    here = os.path.realpath(directory)
    return os.path.commonpath([here, os.path.realpath(path)]) == here


def _copy_store(from_files: Files, to_files: Files, directory: str, source: str) -> None:
    # Zarr opens a store by its root document: remove that first, write it last.
    root = "zarr.json"
    target = os.path.join(directory, os.path.basename(source))
    try:
        both = os.path.exists(source) and os.path.exists(target)
        if both and os.path.samefile(source, target):
            raise CheckpointWriteError(
                f"The store {source!r} and its copy {target!r} are the same directory; "
                f"nothing was changed. Give CopyTo a directory of its own."
            )
        if to_files.is_taken(target):
            if to_files.is_taken(os.path.join(target, root)):
                to_files.remove_file(os.path.join(target, root))
                to_files.sync_path(target)
            to_files.remove_tree(target)
        sizes = dict(from_files.walk(source))
        for parent in sorted({os.path.dirname(os.path.join(target, name)) for name in sizes}):
            to_files.make_directories(parent)

        def copy(name: str, copied: str) -> None:
            _, data = from_files.read_span(os.path.join(source, name), 0, sizes[name])
            to_files.write(os.path.join(target, copied), [data])

        jobs = [functools.partial(copy, name, name) for name in sizes if name != root]
        with to_files.durable(directory, [os.path.basename(target)]):
            run_all(jobs, max(from_files.threads, to_files.threads), sum(sizes.values()))
            copy(root, f"{root}.partial")
        to_files.rename(os.path.join(target, f"{root}.partial"), os.path.join(target, root))
        to_files.sync_path(target)
    except OSError as error:
        raise CheckpointWriteError(
            f"Could not copy the store {source!r} to {target!r}: {error}. The checkpoint itself "
            f"is recorded. Repair the target and run the job again to repeat the copy."
        ) from error
