"""What a view learns from the workers: what tasks print, and how many have ended."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from jobrunner import Job, JobRunner, Node, Session, Task, epoch_limiter
from jobrunner.story import RunNow, prints, watcher
from jobrunner.story.places import View as AnyView
from jobrunner.story.show import MOST_WAITING, Live
from jobrunner.worker.program import Program

REACHED, LET_GO = threading.Event(), threading.Event()


class View(AnyView):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.run = RunNow()

    def open(self) -> None:
        REACHED.clear()
        LET_GO.clear()

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        self.told.append((event, about))

    def draw(self, run: RunNow) -> None:
        self.run = run

    def close(self) -> None:
        LET_GO.set()

    @property
    def prints(self) -> list[tuple[str, ...]]:
        return [tuple(about.values()) for event, about in self.told if event == "print"]


class Binding:
    """Notes whether it is asked for prints."""

    looked_at = look_seconds = 0.0

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def look(self, seconds: float, *, prints: bool, is_over: bool) -> list[Any]:
        self.asked.append(prints)
        return []


def speak(n: int) -> int:
    print("first", n)
    print("bar 1\rbar 2", file=sys.stderr)
    print("no", "end", end="")
    return n + 1


def make(function: Any = speak, epochs: int = 1) -> Job:
    with Job("talk") as job:
        with job.init_group:
            Task(print, kwargs={"end": "made\n"}, node=Node("a"), name="begin")
            Task(lambda: 1, outputs="n", node=Node("a"))
        Task(function, inputs="n", outputs="n", node=Node("a"), name="speak")
    epoch_limiter(job, epochs)
    return job


def run(session: Session, job: Job, **options: Any) -> View:
    view = View()
    with Live(view, **{"interval_seconds": 0.0, "where": "leave", **options}) as live:
        JobRunner(job, callbacks=[live.state]).run(session, progress=False)
    return view


@contextlib.contextmanager
def streams() -> Iterator[io.StringIO]:
    """The streams of this process, in which the workers are."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.redirect_stderr(io.StringIO()) as errors:
        yield found
        assert (sys.stdout, sys.stderr) == (found, errors)


SAID = [
    ("a", "begin", "made"),
    ("a", "speak", "first 1"),
    ("a", "speak", "bar 2"),
    ("a", "speak", "no end"),
]


@pytest.mark.parametrize(
    ("here", "where", "is_taken", "is_written"),
    [
        (prints.names_of(None), "leave", False, True),
        (prints.names_of(None), "take", True, False),
        (prints.names_of(None), "copy", True, True),
        ((), "take", True, True),
        ((), "leave", True, True),
    ],
)
def test_prints_get_to_the_user_once(
    inproc_session: Session, here: Any, where: Any, is_taken: bool, is_written: bool
) -> None:
    with streams() as stdout:
        view = run(inproc_session, make(), here=here, where=where)
    assert sorted(view.prints) == (sorted(SAID) if is_taken else [])
    assert stdout.getvalue() == ("made\nfirst 1\nno end" if is_written else "")


def test_a_view_that_fails_takes_no_prints(
    inproc_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: View) -> None:
        raise RuntimeError("no display")

    monkeypatch.setattr(View, "open", fail)
    with streams() as stdout:
        run(inproc_session, make(), here=prints.names_of(None), where="take")
    assert stdout.getvalue() == "made\nfirst 1\nno end"


class Gone(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("where", ["take", "copy"])
def test_a_task_may_print_though_nobody_reads_the_output_any_more(
    inproc_session: Session, where: Any
) -> None:
    job = make(lambda n: print(n, flush=True) or n)
    here = prints.names_of(None)
    with contextlib.redirect_stdout(Gone()):
        run(inproc_session, job, here=here, where=where)
    assert inproc_session.fetch(Node("a")["n"]) == 1


def test_only_the_session_of_the_view_is_heard(
    inproc_session: Session,
) -> None:
    view = View()
    job = make()
    with (
        streams() as stdout,
        Session(inproc_session.client) as other,
        Live(view, interval_seconds=0.0, where="leave") as live,
        Live(View(), interval_seconds=0.0) as beside,  # takes nothing from the other view
    ):

        class Between:
            def on_load(self, *args: object) -> None: ...

            def on_epoch(self, *args: object) -> None:
                print("the client")
                other.run(Task(print, kwargs={"end": "other\n"}, node=Node("b")))

        JobRunner(job, callbacks=[live.state, beside.state, Between()]).run(
            inproc_session, progress=False
        )
    assert sorted(view.prints) == sorted(SAID)
    assert "the client\nother\n" in stdout.getvalue()


def shout(n: int) -> int:
    for i in range(prints.MOST_LINES + 7):
        print(i)
    return n


def test_of_too_many_lines_the_number_is_told(inproc_session: Session) -> None:
    with streams() as stdout:
        view = run(inproc_session, make(shout), here=())
    assert len(view.prints) <= prints.MOST_LINES + 1
    left_out = sum(about["lines"] for event, about in view.told if event == "prints_left_out")
    assert len(view.prints) + left_out == prints.MOST_LINES + 8
    assert f"{prints.MOST_LINES + 6}\n" in stdout.getvalue()  # the worker's own output


def test_lines_without_room_are_written_where_they_would_be_without_a_view(
    inproc_session: Session,
) -> None:
    with streams() as stdout:
        view = run(inproc_session, make(shout), here=prints.names_of(None), where="take")
    raw = stdout.getvalue().split()
    assert len(raw) + len(view.prints) == prints.MOST_LINES + 8


def draw_over(n: int) -> int:
    for _ in range(100):
        print("\r" + "x" * 100, end="")
    begun = sys.stdout._prints._begun.values()  # type: ignore[attr-defined]
    return max(map(len, begun))


def test_of_a_line_that_is_drawn_again_and_again_only_the_last_is_kept(
    inproc_session: Session,
) -> None:
    job = make(draw_over)
    with streams():
        view = run(inproc_session, job)
    assert ("a", "speak", "x" * 100) in view.prints
    assert inproc_session.fetch(Node("a")["n"]) < 200


def test_workers_keep_prints_while_the_view_is_behind() -> None:
    binding = Binding()
    live = Live(View(), interval_seconds=0.0, where="take")
    live.state._runner = SimpleNamespace(binding=binding)  # type: ignore[assignment]
    live._watcher.look()
    for _ in range(MOST_WAITING):
        live.tell("print", {})
    live._watcher.look()
    live._watcher.look(is_over=True)
    assert binding.asked == [True, False, True]


@pytest.mark.parametrize(
    ("seconds_ago", "look_seconds", "asks"), [(1.5, 0.0, 0), (2.5, 0.0, 1), (2.5, 0.01, 0)]
)
def test_a_view_without_prints_asks_only_if_no_other_has_lately(
    seconds_ago: float, look_seconds: float, asks: int
) -> None:
    binding = Binding()
    binding.looked_at, binding.look_seconds = time.monotonic() - seconds_ago, look_seconds
    live = Live(View(), interval_seconds=1.0)
    live.state._runner = SimpleNamespace(binding=binding)  # type: ignore[assignment]
    live._watcher.look()
    live._watcher.look(is_over=True)
    assert binding.asked == [False] * asks


def test_a_process_without_a_console_still_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    taken = prints.Prints("b", {}, (), "take")
    assert (sys.stdout, sys.stderr) == (None, None)
    taken.end()


def test_no_line_is_lost_if_a_worker_answers_late(
    inproc_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "PATIENCE_SECONDS", 0.1)
    with Job("talk") as job:
        for name in ("a", "b"):
            with Node(name):
                with job.init_group:
                    Task(print, kwargs={"end": f"{name} 0\n"}, name="begin")
                Task(print, kwargs={"end": f"{name} 1\n"}, name="go on")
    epoch_limiter(job, 1)
    view = View()

    class Late:
        def on_group(self, group: str, *args: object) -> None:
            """Node b's worker hears what it is asked, but its answer does not arrive in time."""
            if group != "init":
                return
            messenger = live.state.binding._messenger  # type: ignore[union-attr]
            send, late = messenger._broadcast, live.state.binding.placement["b"]  # type: ignore[union-attr]

            async def broadcast(msg: Mapping[str, Any], workers: list[str]) -> dict[str, Any]:
                answers = await send(msg=msg, workers=workers)
                if late in workers:
                    await asyncio.Event().wait()
                return answers

            messenger._broadcast = broadcast
            live._watcher.look()
            messenger._broadcast = send

    with streams(), Live(view, interval_seconds=0.0, where="take") as live:
        JobRunner(job, callbacks=[live.state, Late()]).run(inproc_session, progress=False)
    assert sorted(text for _, _, text in view.prints) == ["a 0", "a 1", "b 0", "b 1"]


def fail_once(n: int) -> int:
    print("tries")
    if not REACHED.is_set():
        REACHED.set()
        raise OSError("by hand")
    return n


def test_lines_before_and_after_a_loss_are_shown(inproc_session: Session) -> None:
    with Job("again") as job, Node("a"):
        with job.init_group:
            Task(print, kwargs={"end": "made\n"}, name="begin")
            Task(lambda: 1, outputs="n")
        Task(fail_once, inputs="n", outputs="n", name="try", transient_errors=(OSError,))
    epoch_limiter(job, 1)
    with streams() as stdout:  # no look but those at the end of a binding
        view = run(
            inproc_session, job, here=prints.names_of(None), where="take", interval_seconds=60.0
        )
    assert [text for _, _, text in view.prints] == ["made", "tries", "made", "tries"]
    assert stdout.getvalue() == ""


def wait(n: int) -> int:
    REACHED.set()
    LET_GO.wait(30)
    return n


def test_a_long_group_is_counted_by_node(
    inproc_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "PATIENCE_SECONDS", 60.0)
    with Job("long") as job:
        with job.init_group:
            Task.on_each([Node("a"), Node("b")], lambda: 1, outputs="n")
        Task(lambda n: n, inputs="n", outputs="m", node=Node("a"), name="before")
        late = Task(wait, inputs="n", outputs="n", node=Node("a"), name="wait")
        Task(lambda n: n, inputs=[late], node=Node("b"), name="after")
    epoch_limiter(job, 1)

    def ask() -> list[tuple[Any, ...]]:
        live._watcher.look()
        nodes = live.state.now().nodes
        return [(it.does, it.task, it.ended, it.tasks) for it in nodes]

    view = View()
    with Live(view, interval_seconds=0.0, where="leave") as live:
        runner = JobRunner(job, callbacks=[live.state])
        thread = threading.Thread(target=runner.run, args=(inproc_session,))
        thread.start()
        assert REACHED.wait(30)
        while not (rows := ask())[1][3]:
            """Node b's worker has not begun its part yet."""
        assert rows == [("runs", "wait", 1, 2), ("waits", None, 0, 1)]
        # Workers that answer late do not take back what they have said.
        monkeypatch.setattr(watcher, "PATIENCE_SECONDS", 0.0)
        assert ask() == rows
        LET_GO.set()
        thread.join()
    assert [it.node for it in view.run.nodes] == ["a", "b"]


def test_a_program_counts_what_has_neither_ended_nor_begun() -> None:
    class Step:
        def __init__(self, position: int, node: str) -> None:
            self.position, self.name = position, f"t{position}"
            self.workspace = type("W", (), {"node": node})

    program = Program.__new__(Program)
    program.steps = [Step(i, "ab"[i % 2]) for i in range(6)]  # type: ignore[misc]
    program.first = [0, 1, 2, 4]
    counts = [0, 0, 0, 1, 0, 0]  # 0 has ended, 1 runs, 2 is ready, 3 waits, 4 is not taken yet
    assert program.progress(counts, [2], 2, [program.steps[1]]) == {
        "a": (1, 3, ""),
        "b": (1, 3, "t1"),
    }
