"""Nothing that a terminal would obey is shown, whatever a checkpoint, a job or a file is called."""

import io
import logging
import os
import pickle
import unicodedata

import pytest

from jobrunner import (
    CheckpointCorruptError,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskFailedError,
    epoch_limiter,
)
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.cluster import UnderWay
from jobrunner.positions import Position
from jobrunner.run.result import ResumePlan
from jobrunner.story import show_on
from jobrunner.workspace.workspace import Workspace
from tests.cli.directories import begin, invoke, save
from tests.saves import save_epoch
from tests.story.test_live import Runner

# All control characters but NUL, and all that are invisible or turn the direction of writing.
HOSTILE = "[red]" + "".join(
    char
    for char in map(chr, range(1, 0x10000))
    if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")
)
NAME = f"{HOSTILE[:100]}\nforged"
HOSTILE += "\nforged"
FILE = "\x1b]0;x\x07\u202e\u200b\x9b\r"
NODE = "a\u202e\u200b\x9b31m\x7f"


def assert_safe(text, kept="\n\t"):
    assert not {char for char in text if not char.isprintable() and char not in kept}


@pytest.fixture
def hostile(tmp_path):
    """A checkpoint directory whose author chose all names, and a run that has not ended."""
    path = tmp_path / f"runs{FILE}"
    manager = begin(path)
    for epoch in range(3):
        save(manager, epoch, {NAME: {HOSTILE: HOSTILE}, "v": epoch})
    details = {"metrics": {HOSTILE: 1.0, "text": HOSTILE}, "stopped_by": [HOSTILE]}
    manager.run.lock.nodes = (NODE, "b")
    workspaces = {node: Workspace(node) for node in (NODE, "b")}
    for workspace in workspaces.values():
        workspace.globals.update({NAME: 1, "v": HOSTILE})
    save_epoch(manager, Position(3), workspaces, details)
    manager.directory.pin(Position(1), HOSTILE)
    manager.run.end()
    for entry in (path / "_log").iterdir():
        read = dict(decode_entry(entry.read_bytes(), int(entry.stem), str(entry)))
        if read["kind"] == "run":
            read["process"]["host"] = read["time"] = HOSTILE
            read["process"]["boot"] = "another"
        if read["kind"] == "end":
            entry.unlink()
        else:
            entry.write_bytes(encode_entry(read))
    for name in (f"stray{FILE}", f"b.7{FILE}"):
        (path / name).mkdir()
    os.mkdir(os.fsencode(path) + b"/stray\x9b31m")  # no UTF-8
    return path


def test_every_command_escapes_what_a_directory_contains(hostile, tmp_path):
    (tmp_path / "above" / f"run{FILE}" / "_log").mkdir(parents=True)
    for command in (
        ("ls", hostile),
        ("ls", tmp_path / "above"),
        ("ls", hostile.parent, "--best", FILE),
        ("top", hostile),
        ("compare", hostile, hostile),
        ("info", hostile, 3),
        ("info", hostile, FILE),
        ("verify", hostile, "--deep"),
        ("diff", f"{hostile}@2", "@3"),
        ("pin", hostile, 2, "--label", FILE),
        ("unpin", hostile, 2, "--label", FILE),
        ("prune", hostile, "--keep-best", FILE),
        ("prune", hostile, "--keep-last", 1, "--take-over"),
        ("copy", hostile, "all", tmp_path / f"copy{FILE}"),
        ("restore", hostile, 7),
        ("fsck", hostile, "--repair"),
        ("run", f"{FILE}:{FILE}", "--checkpoint", hostile, f"--{FILE}"),
        ("run", "job.py", "--checkpoint", hostile, "--resume", FILE),
        (FILE,),
    ):
        for words in (command, (*command, "--json")):
            result = invoke(*words)
            assert result.exception is None or isinstance(result.exception, SystemExit)
            assert result.output, words
            assert_safe(result.output)
            forged = [line for line in result.output.splitlines() if line.startswith("forged")]
            assert not forged, (words, result.output)
    assert "[red]\\x01" in invoke("info", hostile, 3).output


def test_errors_and_logs_are_escaped(inproc_session, caplog, hostile):
    def fail():
        raise ValueError(HOSTILE)

    with Job("j") as job:
        Task(fail, node=Node("n"), name="t")
    epoch_limiter(job, 1)
    with pytest.raises(TaskFailedError) as caught:
        JobRunner(job).run(inproc_session)
    told = [*caught.value.__notes__, *map(str, (caught.value, DefinitionError(HOSTILE)))]
    told.append(str(pickle.loads(pickle.dumps(CheckpointCorruptError(HOSTILE)))))
    with MultiNodeCheckpointManager(hostile).open(3) as checkpoint:
        told += [repr(checkpoint), *map(repr, checkpoint.values())]
    (hostile / "_log" / "state.json").write_bytes(b"damaged")
    with caplog.at_level(logging.DEBUG, "jobrunner"):
        MultiNodeCheckpointManager(hostile).epochs()
    assert "without its state" in caplog.text
    (hostile / "_log" / "0000000001.json").write_bytes(b"damaged")
    with pytest.raises(CheckpointCorruptError) as damage:
        MultiNodeCheckpointManager(hostile).epochs()
    told.append(str(damage.value))
    for text in (*told, caplog.text):
        assert "\\u200b" in text
        assert_safe(text)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_shows_markup_and_control_characters_as_text(is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    with show_on(stream) as live:
        live.state.on_setup(Runner(UnderWay("epoch", 1, 2.0, (f"a/{HOSTILE}",)), HOSTILE))
        live.state.on_start(ResumePlan(None, HOSTILE, warnings=(HOSTILE,)), 3)
        logging.getLogger("jobrunner.x").warning("%s", HOSTILE)
        live.state.on_epoch(1, 0.1, {HOSTILE: 1.0})
    told = stream.getvalue()
    assert "[red]\\x01" in told
    if not is_terminal:
        assert_safe(told)
    assert not set(told) & {"\x07", "\x9b", "\u202e", "\u200b", "\x08"}
    assert "\x1b]" not in told
