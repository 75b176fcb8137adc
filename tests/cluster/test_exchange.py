"""What a client asks next, which workers it counts as lost, and what it raises."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner import BlobNotFoundError, ExecutionError, NodeLostError, TaskFailedError
from jobrunner.cluster.exchange import (
    FIRST_WAIT_SECONDS,
    LOSS_SECONDS,
    NEWS_SECONDS,
    POLL_SECONDS,
    WARN_SECONDS,
    Abort,
    Ask,
    AwaitNews,
    Heard,
    Member,
    Members,
    Reply,
    Request,
    exchange,
)
from jobrunner.cluster.placement import WorkerInfo
from jobrunner.worker.outcome import describe_failure

A, B, C = "tcp://h:1", "tcp://h:2", "tcp://h:3"
DONE = {"status": "done"}
FAILED = {"status": "failed"}


def running(*tasks):
    return {"status": "running", "tasks": list(tasks)}


class Play:
    """An exchange with two workers, or more, with one node each: a, b, c."""

    def __init__(self, request, addresses=(A, B)):
        self.members = Members(dict(zip("abc", addresses, strict=False)))
        for address in addresses:
            info = WorkerInfo(address, "w", "h", nthreads=1)
            self.members.workers[address] = Member(info, "incarnation")
        self.request, self.now = request, 100.0
        self.steps = exchange(request, list(addresses), self.members, self.now)
        self.action = next(self.steps)

    def hear(self, answers=None, *, after=0.0, lost=None):
        """What came of the last action, so many seconds after it; gives the next action."""
        self.now += after
        self.members.lost |= lost or {}
        self.action = self.steps.send(Heard(self.now, answers or {}))
        return self.action

    def end(self, answers=None, **details):
        """The same; gives the statuses of the replies."""
        with pytest.raises(StopIteration) as end:
            self.hear(answers, **details)
        return {address: reply.status for address, reply in end.value.value.items()}


def run(**options):
    return Play(Request("run", {"key": "epoch"}, number=7, group="epoch", **options))


def polls(action):
    """The message and wait of an action that polls; all workers get the same."""
    [(message, addresses)] = action.mailings
    assert message == {"call": "run", "number": 7, "wait_seconds": action.wait_seconds}
    return list(addresses), action.wait_seconds


# ---- answers and polls


def test_one_message_begins_and_its_replies_end_an_operation():
    play = run()
    first = {"call": "run", "number": 7, "wait_seconds": FIRST_WAIT_SECONDS, "key": "epoch"}
    assert play.action == Ask([(first, [A, B])], [A, B], FIRST_WAIT_SECONDS)
    assert list(play.end({B: DONE, A: {**DONE, "runs": []}})) == [A, B]


def test_first_messages_have_arguments_of_each_worker_and_all_have_the_channel():
    own = {A: {"y": 2}, B: {"y": 3}}
    play = Play(Request("apply", {"x": 1}, per_worker=own, channel="save", number=1))
    first = {"call": "apply", "number": 1, "channel": "save", "wait_seconds": FIRST_WAIT_SECONDS}
    assert play.action.mailings == [({**first, "x": 1, **own[to]}, [to]) for to in (A, B)]
    again = play.hear({A: running(), B: running()})
    assert again.mailings == [({**first, "wait_seconds": POLL_SECONDS}, [A, B])]


def test_all_workers_of_a_run_are_polled_until_the_last_has_replied():
    play = run()
    assert polls(play.hear({A: DONE, B: running(("b", "slow"))})) == ([A, B], POLL_SECONDS)
    assert play.members.running == {B: [("b", "slow")]}
    assert list(play.end({A: DONE, B: DONE})) == [A, B]


def test_a_done_part_fails_if_its_values_then_do_not_reach_another_worker():
    play = run()
    play.hear({A: DONE, B: running()})
    assert isinstance(play.hear({A: FAILED, B: running()}), Abort)
    assert polls(play.hear()) == ([B], POLL_SECONDS)
    assert play.end({B: {"status": "aborted"}}) == {A: "failed", B: "aborted"}


def test_other_operations_are_polled_only_on_workers_that_are_not_done():
    play = Play(Request("apply", number=1))
    assert play.hear({A: DONE, B: running()}).addresses == [B]
    assert play.members.running == {}
    assert play.end({B: DONE}) == {A: "done", B: "done"}


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.lists(st.sampled_from(["done", "failed", "gone"]), min_size=3, max_size=3),
)
def test_however_its_parts_end_a_run_ends_and_none_goes_on(polls, ends):
    play = Play(Request("run", number=7), [A, B, C])
    left, ends = dict(zip([A, B, C], polls, strict=True)), dict(zip([A, B, C], ends, strict=True))
    told, ended, action = set(), {}, play.action

    def answer(address):
        left[address] -= 1
        if left[address] < 0 and ends[address] == "gone":
            return OSError("closed")
        if left[address] < 0 or address in told:
            ended.setdefault(address, "aborted" if address in told else ends[address])
            return {"status": ended[address]}
        return running()

    for _ in range(20):
        answers = {}
        if isinstance(action, Abort):
            told.update(action.addresses)
        elif isinstance(action, Ask):
            answers = {address: answer(address) for address in action.addresses}
        try:
            action = play.steps.send(Heard(100.0, answers))
        except StopIteration as end:
            replies = end.value
            assert {address: replies[address].status for address in replies} == ended
            break
        except NodeLostError:
            assert {ends[address] for address in play.members.lost} == {"gone"}
            assert told | set(play.members.lost) | set(ended) == {A, B, C}
            break
    else:
        pytest.fail("it does not end")


# ---- failures and aborts


def test_an_error_that_a_worker_reports_is_raised():
    request = Request("run", group="epoch", epoch=3)
    failure = describe_failure("a", "t", ValueError("by hand"))
    done = Reply("done")
    error = request.failure({A: done, B: Reply("failed", failure=failure)}, "job")
    assert isinstance(error, TaskFailedError)
    assert re.search(r"'t' .node 'a'.* failed at epoch 3: .*by hand", str(error))
    assert (error.node, error.task, error.epoch) == ("a", "t", 3)
    own = describe_failure("a", "t", BlobNotFoundError("no 'x'"), is_own=True)
    error = request.failure({A: Reply("failed", failure=own)}, "job")
    assert isinstance(error, BlobNotFoundError)
    assert str(error).startswith("Job 'job', group 'epoch' at epoch 3: no 'x'")
    error = request.failure({A: Reply("aborted", reason="why")}, "job")
    assert "h:1 did not finish its part of the epoch group: why. St" in str(error)
    assert request.failure({A: done}, "job") is None


def test_a_worker_that_has_yet_to_host_the_binding_is_asked_from_the_start_again():
    play = Play(Request("apply", {"x": 1}, number=1))
    again = play.hear({A: DONE, B: {"status": "waiting"}})
    assert [(message.get("x"), to) for message, to in again.mailings] == [(1, [B])]
    assert play.members.waiting == {B}
    play.end({B: DONE})
    assert play.members.waiting == set()


# ---- deadlines


def test_a_deadline_shortens_the_last_wait_and_then_names_the_late_nodes():
    play = run(deadline_seconds=3.0, epoch=2)
    assert polls(play.hear({A: DONE, B: running()}, after=1.5)) == ([A, B], 1.5)
    with pytest.raises(
        ExecutionError, match=r"epoch group did not end within 3 s at epoch 2\. .*'b' .*b/slow"
    ):
        play.hear({A: DONE, B: running(("b", "slow"))}, after=1.5)


def test_late_workers_are_reported_at_growing_intervals(caplog):
    play = Play(Request("apply", number=1, activity="the save of epoch 2"))
    answers = {A: DONE, B: running()}
    for _ in range(5 * int(WARN_SECONDS / POLL_SECONDS)):
        play.hear(answers, after=POLL_SECONDS)
        answers = {B: running()}
    told = "The save of epoch 2 has taken {} s. Still waiting for 'b'."
    assert caplog.messages == [told.format(seconds) for seconds in (62, 122, 242)]


# ---- losses


def lose(play, answers=None, **details):
    """Losses end an exchange, once the other workers got an abort; gives the error."""
    abort = play.hear(answers, **details)
    assert isinstance(abort, Abort)
    with pytest.raises(NodeLostError) as lost:
        play.hear()
    assert set(abort.addresses) == set(play.members.workers) - set(play.members.lost)
    return lost.value


def test_a_worker_that_the_scheduler_removes_ends_the_exchange():
    play = run(epoch=4)
    play.hear({A: running(), B: running(("b", "t"))})
    play.members.lost[B] = "the scheduler removed it"
    error = lose(play)
    assert (error.nodes, error.worker, error.epoch) == (("b",), B, 4)
    assert error.running == ("b/t",)
    assert "the scheduler removed it" in str(error)
    # What the messenger finds outweighs the worker's answer.
    error = lose(run(), {A: DONE, B: DONE}, lost={B: "it has not answered for 30 s"})
    assert error.worker == B
    assert "it has not answered for 30 s" in str(error)


@pytest.mark.parametrize("answer", [{"status": "unknown"}, None, "?"])
def test_a_successor_at_the_same_address_is_a_loss(answer):
    assert "restarted and lost this session's state" in str(lose(run(), {A: DONE, B: answer}))


def test_losses_found_while_others_are_aborted_are_in_the_error():
    play = Play(Request("run", number=7), [A, B, C])
    assert isinstance(play.hear({}, lost={A: "gone"}), Abort)
    play.members.lost[C] = "the scheduler removed it"
    with pytest.raises(NodeLostError, match="2 workers") as error:
        play.hear()
    assert error.value.nodes == ("a", "c")


def test_an_error_for_an_answer_is_a_loss_unless_the_worker_is_about_to_leave():
    play = run()
    assert play.hear({A: running(), B: OSError("closed")}) == AwaitNews(NEWS_SECONDS, B)
    assert "OSError: closed" in str(lose(play))


def test_a_worker_that_leaves_is_asked_from_the_start_once_more_and_only_once():
    play = run()
    play.hear({A: running(), B: OSError("closed")})
    play.members.leaving[B] = "the scheduler retires it"
    again = play.hear()
    assert [(message.get("key"), to) for message, to in again.mailings] == [
        ("epoch", [B]),
        (None, [A]),
    ]
    assert polls(play.hear({A: running(), B: running()})) == ([A, B], POLL_SECONDS)
    assert "OSError" in str(lose(play, {A: DONE, B: OSError("closed")}))


def test_a_worker_that_another_could_not_reach_is_lost_and_no_task_is_to_blame():
    play = run()
    play.hear({A: running(), B: running(("b", "t"))})
    suspect = {**FAILED, "suspect": B, "reason": "h:1 could not reach it"}
    assert play.hear({A: suspect, B: running(("b", "t"))}) == AwaitNews(LOSS_SECONDS)
    error = lose(play)
    assert (error.worker, error.running) == (B, ())
    assert play.members.cut == {B}


def test_the_schedulers_news_of_a_loss_outweigh_another_workers():
    play = run()
    play.hear({A: {**FAILED, "suspect": B, "reason": "no"}, B: running(("b", "t"))})
    play.members.lost[A] = "the scheduler removed it"
    assert lose(play).worker == A
    assert play.members.cut == set()
