"""Scenarios of Caffe2's checkpoint tests, as they must hold here.

The dataset of each node is 0..9. Init makes ``total = 100`` and a reader over the dataset; each
epoch adds at most three values to it; the job stops when the reader has run out.
"""

import pytest

from jobrunner import (
    CheckpointManager,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    current_task,
)
from tests.jobs import Listener

TOTALS = {1: 103, 2: 115, 3: 136, 4: 145}


def read_three(position, total):
    values = range(10)[position : position + 3]
    return position + len(values), total + sum(values), len(values) < 3


def see(log, what):
    with open(log, "a") as file:
        task = current_task()
        file.write(f"{what} {task.node} {task.epoch} {task.workspace.get('total')}\n")


def build(nodes=1, log=None):
    with Job("sum") as job:
        for i in range(nodes):
            with Node(f"trainer_{i}"):
                with job.init_group:
                    Task(lambda: (0, 100), outputs=["position", "total"], name="init")
                read = Task(
                    read_three,
                    inputs=["position", "total"],
                    outputs=["position", "total", "is_out"],
                )
                job.add_stop_condition(read.output(2))
                if log is not None:
                    with job.download_group:
                        Task(see, kwargs={"log": log, "what": "download"}, name="see")
                    with job.exit_group:
                        Task(see, kwargs={"log": log, "what": "exit"}, name="see")
    return job


def totals(session, nodes=1):
    return [session.fetch(Node(f"trainer_{i}")["total"]) for i in range(nodes)]


@pytest.fixture(
    params=[
        pytest.param(1, id="one-node"),
        pytest.param(3, id="three-nodes", marks=pytest.mark.processes),
    ]
)
def nodes(request):
    return request.param


def test_from_scratch_checkpointing_every_epoch(session, manager, nodes):
    result = JobRunner(build(nodes), manager).run(session)
    assert (result.epoch, result.resumed_from, result.restarts) == (4, None, 0)
    assert result.stopped_by == "trainer_0/read_three"
    assert manager.epochs() == [0, 1, 2, 3, 4]
    for epoch, total in TOTALS.items():
        for i in range(nodes):
            assert manager.open(epoch)[f"trainer_{i}"]["total"] == total
    assert totals(session, nodes) == [145] * nodes
    assert [save.epoch for save in result.saves] == [0, 1, 2, 3, 4]
    assert result.failed_saves == []
    assert [metrics["epoch"] for metrics in result.metrics] == [1, 2, 3, 4]


def test_resume_from_each_epoch_in_turn(client, manager, nodes):
    with Session(client) as session:
        JobRunner(build(nodes), manager).run(session)
    for epoch in TOTALS:
        with Session(client) as session:
            again = MultiNodeCheckpointManager(manager.path)
            result = JobRunner(build(nodes), again, epoch).run(session)
            assert (result.resumed_from, result.epoch) == (epoch, 4)
            assert totals(session, nodes) == [145] * nodes


def test_load_an_epoch_and_fetch(client, manager, nodes):
    with Session(client) as session:
        JobRunner(build(nodes), manager).run(session)
    with Session(client) as session:
        for epoch, total in TOTALS.items():
            session.run(manager.load(epoch))
            assert totals(session, nodes) == [total] * nodes


@pytest.mark.processes
def test_load_some_blobs_into_an_empty_workspace(client, manager):
    runner = JobRunner(build(3), manager)
    with Session(client) as session:
        runner.run(session)
    wanted = [Node("trainer_1")["total"], Node("trainer_2")["total"]]
    for epoch, total in TOTALS.items():
        with Session(client) as session:
            assert runner.load_blobs_from_checkpoints(wanted, epoch, session) is True
            assert [session.fetch(blob) for blob in wanted] == [total, total]
            names = [
                session.run(Task(lambda: sorted(current_task().workspace), node=blob.node))
                for blob in wanted
            ]
            assert names == [["total"], ["total"]]
    with Session(client) as session:
        assert runner.load_blobs_from_checkpoints(wanted, 5, session) is False


def test_a_path_that_cannot_be_written_is_reported_and_every_epoch_runs(session, tmp_path, nodes):
    (tmp_path / "file").write_text("in the way")
    listener = Listener()
    manager = MultiNodeCheckpointManager(tmp_path / "file" / "ckpt")
    result = JobRunner(build(nodes), manager, callbacks=[listener]).run(session)
    assert result.epoch == 4
    assert totals(session, nodes) == [145] * nodes
    assert [save.epoch for save in result.failed_saves] == [0, 1, 2, 3, 4]
    assert all(str(tmp_path / "file") in save.error for save in result.failed_saves)
    # The failure is reported once, however long the job is.
    first, last = listener.warnings
    assert "The run starts anyway" in first
    assert last == "5 more saves failed, the last that of epoch 4."


@pytest.mark.processes
def test_blobs_first_made_in_the_epoch_group_are_not_saved_nor_there_in_the_next_epoch(
    session, tmp_path, manager
):
    seen = tmp_path / "seen"

    def look():
        with open(seen, "a") as file:
            file.write(f"{'scratch' in current_task().workspace}\n")

    with Job() as job, Node("trainer_0"):
        with job.init_group:
            Task(lambda: 1, outputs="kept")
        first = Task(look, name="look")
        make = Task(lambda: 2, outputs="scratch", name="make", after=first)
        Task(look, name="look again", after=make)
    JobRunner(job, manager, num_epochs=2).run(session)
    assert seen.read_text().split() == ["False", "True"] * 2
    for epoch in range(3):
        assert list(manager.open(epoch)["trainer_0"]) == ["kept"]


@pytest.mark.processes
def test_a_single_node_manager_does_the_same(session, tmp_path):
    manager = CheckpointManager(tmp_path / "ckpt", "trainer_0")
    result = JobRunner(build(), manager).run(session)
    assert result.epoch == 4
    assert manager.open(2)["trainer_0"]["total"] == 115
    assert JobRunner(build(), manager, 2).run(session).resumed_from == 2


def test_a_job_that_has_finished_runs_neither_epochs_nor_its_last_groups_again(
    client, tmp_path, manager, nodes
):
    log = tmp_path / "log"
    for _ in range(3):
        with Session(client) as session:
            result = JobRunner(build(nodes, str(log)), manager).run(session)
            assert (result.epoch, result.stopped_by) == (4, "trainer_0/read_three")
            assert totals(session, nodes) == [145] * nodes
    assert result.resumed_from == 4
    assert result.metrics == []
    # Download and exit ran once, in this order, after the last epoch.
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [what for what, *_ in lines] == ["download"] * nodes + ["exit"] * nodes
    assert [rest for _, _, *rest in lines] == [["4", "145"]] * 2 * nodes
