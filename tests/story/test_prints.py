"""What tasks print, in a view."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jobrunner import Job, JobRunner, Node, Session, Task, epoch_limiter
from jobrunner.story import RunNow
from jobrunner.story.places import View as AnyView
from jobrunner.story.show import Live
from jobrunner.worker import prints

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
    with streams() as stdout:
        view = run(
            inproc_session, job, here=prints.names_of(None), where="take", interval_seconds=60.0
        )
    assert [text for _, _, text in view.prints] == ["made", "tries", "made", "tries"]
    assert stdout.getvalue() == ""


def wait(n: int) -> int:
    print("waits")
    assert LET_GO.wait(30)
    return n


def test_what_a_long_task_prints_is_shown_while_it_runs(inproc_session: Session) -> None:
    class Eager(View):
        def tell(self, event: str, about: Mapping[str, Any]) -> None:
            if about.get("text") == "waits":
                LET_GO.set()

    view = Eager()
    with streams(), Live(view, interval_seconds=0.0, where="leave") as live:
        JobRunner(make(wait), callbacks=[live.state]).run(inproc_session, progress=False)
        assert LET_GO.is_set()


def test_without_a_view_tasks_print_as_ever(inproc_session: Session) -> None:
    with streams() as stdout:
        run(inproc_session, make(), here=prints.names_of(None), where="take")
        inproc_session.run(Task(print, kwargs={"end": "later\n"}, node=Node("a")))
    assert stdout.getvalue() == "later\n"
