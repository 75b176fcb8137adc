"""Who may take a directory, judged by processes and heartbeats; the clock is the test's."""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from jobrunner import CommitConflictError, MultiNodeCheckpointManager
from jobrunner.checkpoint import FileMetadataHandler
from jobrunner.checkpoint.log.entries import Entry, Holder, Process
from jobrunner.checkpoint.log.heartbeat import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    Beat,
    Heartbeat,
    Patience,
    Status,
    is_known_dead,
    may_live,
    own_process,
    read_beat,
)
from jobrunner.checkpoint.log.lock import refuse_if_alive
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.positions import Position
from jobrunner.run.decisions import Losses, Progress
from jobrunner.workspace.workspace import Workspace
from tests.saves import Save

RUN = "0123"


class Time:
    """A clock that only moves when somebody waits on it."""

    def __init__(self, on_wait: Any = None) -> None:
        self.now = 100.0
        self.on_wait = on_wait

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.on_wait is not None:
            self.on_wait(self.now)

    def patience(self, silence_seconds: float = 15.0) -> Patience:
        return Patience(silence_seconds, clock=lambda: self.now, wait=self.wait)


def write_beat(path: Path, content: str) -> Path:
    file = path / RUNS_DIRECTORY / RUN / HEARTBEAT
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def while_all_beat(path: Path) -> Patience:
    """All runs beat as long as somebody waits."""

    def beat(now: float) -> None:
        for file in path.glob(f"{RUNS_DIRECTORY}/*/{HEARTBEAT}"):
            file.write_text(str(now))

    return Time(beat).patience()


def test_a_run_that_beats_slowly_may_live_for_several_beats() -> None:
    process = replace(own_process(), host="another")
    assert may_live(100.0, process, RUN, beat_seconds=30.0)
    assert not may_live(100.0, process, RUN, beat_seconds=1.0)


def test_another_process_with_the_same_pid_is_told_apart() -> None:
    parent = replace(own_process(), pid=os.getppid(), started="0")
    assert is_known_dead(parent, RUN)


def test_a_zombie_is_known_dead_and_a_process_elsewhere_never() -> None:
    code = (
        "import msgspec, sys; from jobrunner.checkpoint.log.heartbeat import own_process;"
        "print(msgspec.json.encode(own_process()).decode(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as victim:
        process = msgspec.json.decode(victim.stdout.readline(), type=Process)
        assert not is_known_dead(process, RUN)
        victim.kill()
        os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        assert is_known_dead(process, RUN)
    assert is_known_dead(process, RUN)
    for what in ("host", "boot", "namespace"):
        assert not is_known_dead(replace(process, **{what: "another"}), RUN)


def test_a_silent_run_elsewhere_is_taken_over_after_the_silence(tmp_path: Path) -> None:
    """But never sooner than five of its own beats; what clock another machine has is no matter."""
    for file_time in (0, 4e9):
        os.utime(write_beat(tmp_path, "0"), (file_time, file_time))
        for silence, least in ((15.0, 15), (1.0, 10)):
            time = Time()
            process = replace(own_process(), host="another", pid=1)
            holder = Holder(0, RUN, "then", process, heartbeat_seconds=2.0)
            refuse_if_alive(PosixFiles(), str(tmp_path), holder, time.patience(silence))
            assert 100 + least <= time.now < 102 + least


def test_a_run_in_the_same_process_that_lives_is_refused(tmp_path: Path) -> None:
    holder, other = (MultiNodeCheckpointManager(tmp_path) for _ in range(2))
    holder.run.start(["a"], {})
    other.run.patience = while_all_beat(tmp_path)
    with pytest.raises(CommitConflictError, match=r"alive.*--take-over"):
        other.run.start(["a"], {})
    assert len(list(tmp_path.glob(f"{RUNS_DIRECTORY}/*"))) == 1
    holder.run.end()


def test_a_run_that_has_ended_or_was_dropped_is_followed_at_once(tmp_path: Path) -> None:
    for is_dropped in (True, False, False):
        manager = MultiNodeCheckpointManager(tmp_path)
        time = Time()
        manager.run.patience = time.patience()
        manager.run.start(["a"], {})
        assert time.now == 100
        if not is_dropped:
            manager.run.end()
        del manager
        gc.collect()


def test_of_two_newcomers_one_gets_the_directory(tmp_path: Path) -> None:
    """The second reads on, finds the first alive, and is refused."""
    first = MultiNodeCheckpointManager(tmp_path)

    class Racing(PosixFiles):
        def create(self, path: str, data: bytes) -> bool:
            if first.run.lock is None:
                first.run.start(["a"], {})
            return super().create(path, data)

    second = MultiNodeCheckpointManager(tmp_path, files=Racing())
    second.run.patience = while_all_beat(tmp_path)
    with pytest.raises(CommitConflictError):
        second.run.start(["a"], {})
    first.run.end()


def test_a_run_that_is_taken_over_at_once_deletes_nothing_of_its_successor(tmp_path: Path) -> None:
    second = MultiNodeCheckpointManager(tmp_path, take_over=True)
    workspaces = {"a": Workspace("a")}

    class Overtaken(FileMetadataHandler):
        """Between this run's first entry and the answer to it, another takes over and saves."""

        def append(self, entry: Entry) -> bool:
            is_kept = super().append(entry)
            second.run.start(["a"], {})
            self.save = Save(second, Position(0))
            self.receipts = self.save.write(workspaces)
            return is_kept

    handler = Overtaken()
    first = MultiNodeCheckpointManager(tmp_path, handler)
    with pytest.raises(CommitConflictError):
        first.run.start(["a"], {})
    first.retention.sweeper.drain()
    handler.save.commit(handler.receipts)
    second.verify(0)
    second.run.end()
    first.run.end()
    assert MultiNodeCheckpointManager(tmp_path).epochs() == [0]


def test_a_run_that_was_taken_over_leaves_its_stores_to_the_other_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (MultiNodeCheckpointManager(tmp_path, take_over=True) for _ in range(2))
    first.run.start(["a"], {})
    Save(first, Position(0)).write({"a": Workspace("a")})
    second.run.start(["a"], {})
    first.run.end()
    assert caplog.text.count("has taken over") == 1
    second.run.end()
    assert not (tmp_path / "a.0").exists()


def test_a_newcomer_keeps_its_traces_while_another_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "k"
    newcomer = MultiNodeCheckpointManager(path, take_over=True)
    waiting = Heartbeat(PosixFiles(), str(path), "waiting", 60)

    class Racing(PosixFiles):
        def before(self, operation: str, path: str) -> None:
            if operation == "list" and path.endswith(RUNS_DIRECTORY) and newcomer.run.lock is None:
                waiting.start()
                newcomer.run.start(["a"], {})

    MultiNodeCheckpointManager(path, files=Racing()).run.start(["a"], {})
    left = {run.name for run in (path / RUNS_DIRECTORY).iterdir()}
    assert {newcomer.run.lock.run, "waiting"} <= left
    newcomer.run.probe()
    waiting.stop()
    newcomer.run.end()


def test_heartbeats_continue_after_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beats: list[bytes] = []
    enough = threading.Event()

    class Watched(PosixFiles):
        def put(self, path: str, data: bytes, *, durable: bool = False) -> None:
            beats.append(data)
            if len(beats) == 2:
                raise OSError("no room")
            if len(beats) == 4:
                enough.set()
            super().put(path, data, durable=durable)

    heartbeat = Heartbeat(Watched(), str(tmp_path), RUN, 0.001)
    heartbeat.start()
    assert enough.wait(10)
    heartbeat.stop()
    assert beats == sorted(set(beats))
    assert re.search("Cannot write the heartbeat in .*: no room", caplog.text)


def beat_of(path: Path, status: Any) -> Beat:
    """What a heartbeat says of a run with this status."""
    heartbeat = Heartbeat(PosixFiles(), str(path), RUN, 60, status)
    heartbeat.start()
    beat = read_beat(PosixFiles(), str(path), RUN)
    heartbeat.stop()
    assert beat.process == own_process()
    assert abs(beat.seconds_ago) < 60
    return beat


def test_a_heartbeat_says_how_far_the_run_is(tmp_path: Path) -> None:
    status = beat_of(tmp_path, lambda: Status(7, 3, {"loss": 0.5, "nan": math.nan})).status
    assert status == Status(7, 3, {"loss": 0.5, "nan": None})
    many = {f"metric {i}": 1.0 for i in range(5000)}  # do not fit in and are left out
    assert beat_of(tmp_path, lambda: Status(7, 3, many)).status == Status(7, 3)
    # Metrics that JSON cannot say: the run is alive, and no more is said.
    for metrics in ({"big": 10**400}, {"\ud800": 1.0}):
        progress = Progress(Losses(0), epoch=1, metrics={1: metrics})
        assert beat_of(tmp_path, progress.status).status is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"time": "now"}',
        '{"time": 5, "status": {"epoch": -1, "num_ended": 0}}',
        '{"time": 5, "status": {"epoch": 1, "num_ended": 0, "metrics": [1]}}',
        '{"process": {"pid": -1}}',
        "[" * 10_000,
    ],
)
def test_a_forged_heartbeat_says_nothing(tmp_path: Path, content: str) -> None:
    write_beat(tmp_path, content)
    beat = read_beat(PosixFiles(), str(tmp_path), RUN)
    assert beat.status is None
    assert not may_live(beat.seconds_ago, Process(), RUN, 2.0)
