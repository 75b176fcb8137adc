"""Trackers of runs get what happens, and a run that resumes goes on in the same run there."""

import importlib
from unittest.mock import ANY, MagicMock, call

import pytest

import jobrunner.callbacks
from jobrunner import (
    DefinitionError,
    JobRunner,
    MultiNodeCheckpointManager,
    RunStoppedError,
    SaveEvery,
)
from jobrunner.callbacks import MLflow, TensorBoard, Track, Tracker, WandB
from tests.callbacks.jobs import LOSSES, DiesAfter, build
from tests.pages import blocks

WHOLE = dict(enumerate(LOSSES, start=1))


@pytest.fixture
def manager(tmp_path):
    return MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(epochs=2))


def run_twice(session, manager, make):
    """A run that dies after epoch 5, which is not saved, and one that resumes after epoch 4."""
    with pytest.raises(InterruptedError):
        JobRunner(build(), manager, callbacks=[make(), DiesAfter(5)]).run(session)
    last = make()
    result = JobRunner(build(), manager, callbacks=[last]).run(session)
    assert (result.resumed_from, result.epoch) == (4, 8)
    return last


@pytest.mark.parametrize(("name", "arguments"), [("WandB", ["project"]), ("Prometheus", [])])
def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, name, arguments):
    def find_nothing(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(importlib, "import_module", find_nothing)
    with pytest.raises(DefinitionError, match=rf"{name} needs .*dask-jobrunner\[{name.lower()}\]"):
        getattr(jobrunner.callbacks, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("EpochLog", {"path": "runs/log.txt"}),
        ("Track", {"tracker": "logs"}),
        ("TensorBoard", {"logdir": b"logs"}),
        ("MLflow", {"experiment": "e", "params": [1]}),
        ("WandB", {"project": "p", "library": "comet"}),
        ("EarlyStopping", {"metric": "m", "patience": 0}),
        ("EarlyStopping", {"metric": "m", "min_delta": float("nan")}),
        ("EarlyStopping", {"metric": "m", "mode": "auto"}),
    ],
)
def test_wrong_arguments_are_refused_before_a_library_is_needed(name, arguments):
    wrong = list(arguments)[-1]
    with pytest.raises(DefinitionError, match=f"{name}.*: {wrong} must"):
        getattr(jobrunner.callbacks, name)(**arguments)


EXAMPLES = [(it.comment.removeprefix("needs: "), it.code) for it in blocks("callbacks.md", "py")]


@pytest.mark.parametrize(("library", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_examples_of_the_guide_run(inproc_session, monkeypatch, tmp_path, library, code):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    names = {"JobRunner": JobRunner, "MultiNodeCheckpointManager": MultiNodeCheckpointManager}
    exec(code, {**names, "make": build, "session": inproc_session})


def make_tracker():
    """A tracker that notes what it is told."""
    tracker = MagicMock(spec=Tracker)
    tracker.begin.side_effect = lambda job, run_id, epoch, *, is_new: run_id
    return tracker


def losses_of(tracker):
    return [(told.args[0], told.args[1]["loss"]) for told in tracker.log.mock_calls]


def test_a_tracker_is_told_of_each_epoch_before_it_is_recorded(inproc_session, manager):
    first, second = trackers = [make_tracker(), make_tracker()]
    left = iter(trackers)
    run_twice(inproc_session, manager, lambda: Track(next(left)))
    run_id = first.begin.call_args.args[1]
    assert first.mock_calls[0] == call.begin("descent", run_id, 0, is_new=True)
    assert losses_of(first) == list(WHOLE.items())[:5]
    names = [name for name, _, _ in first.mock_calls]
    logged = [i for i, name in enumerate(names) if name == "log"]
    assert "flush" in names[logged[3] :]  # epoch 4 is saved
    assert first.mock_calls[-1] == call.end("failed")
    assert second.mock_calls[0] == call.begin("descent", run_id, 4, is_new=False)
    assert losses_of(second) == list(WHOLE.items())[4:]
    assert second.mock_calls[-1] == call.end("finished")
    stopped = Track(make_tracker())
    stopped.on_group("init", 0, 0.1)
    stopped.on_error(RunStoppedError("by hand"))
    stopped.tracker.end.assert_called_once_with("stopped")


@pytest.mark.parametrize("forged", ["../../etc", "x" * 65, None])
def test_a_forged_id_is_not_used(forged):
    callback = Track(make_tracker())
    callback.load_state_dict({"id": forged})
    callback.on_load(3, 0, 0.0)
    callback.tracker.begin.assert_called_once_with("", callback.run_id, 3, is_new=True)
    assert len(callback.run_id) == 32


def test_the_id_of_the_record_is_kept_while_a_tracker_does_not_answer():
    callback = Track(make_tracker())
    callback.tracker.begin.side_effect = ConnectionError("no answer")
    callback.load_state_dict({"id": "0" * 32})
    with pytest.raises(ConnectionError):
        callback.on_load(4, 0, 0.0)
    assert callback.state_dict() == {"id": "0" * 32}
    callback.on_epoch(5, 0.5, {"loss": 0.5})
    callback.on_error(ValueError())
    assert len(callback.tracker.mock_calls) == 1


# ---- what libraries are told, whether they are installed or not


def follow(monkeypatch, make, *, is_new=False):
    """Follow two epochs of a run that fails; returns the library that was told."""
    library = MagicMock()
    monkeypatch.setattr(importlib, "import_module", lambda module: library)
    tracker = make()
    tracker.begin("descent", "0" * 32, 4, is_new=is_new)
    tracker.log(5, {"loss": 0.5})
    tracker.log(6, {"loss": 0.25})
    tracker.flush()
    tracker.end("failed")
    return library


@pytest.mark.parametrize(
    ("name", "only_here", "end"),
    [("wandb", {"id": "0" * 32}, {"exit_code": 1}), ("trackio", {}, {})],
)
def test_what_weights_and_biases_or_trackio_is_told(monkeypatch, name, only_here, end):
    library = follow(monkeypatch, lambda: WandB("digits", library=name, dir="here"))
    options = {"project": "digits", "dir": "here", "name": "descent-00000000"}
    assert library.mock_calls == [
        call.init(resume="allow", **options, **only_here),
        call.init().log({"loss": 0.5}, step=5),
        call.init().log({"loss": 0.25}, step=6),
        call.init().finish(**end),
    ]


def test_what_tensorboard_is_told(monkeypatch):
    library = follow(monkeypatch, lambda: TensorBoard("logs"))
    assert library.mock_calls == [
        # Each file has a name of its own, and hides later epochs that other files have.
        call.SummaryWriter("logs", purge_step=5, filename_suffix=ANY),
        call.SummaryWriter().add_scalar("loss", 0.5, 5),
        call.SummaryWriter().add_scalar("loss", 0.25, 6),
        call.SummaryWriter().flush(),
        call.SummaryWriter().close(),
    ]


def test_what_mlflow_is_told(monkeypatch):
    def make():
        return MLflow("digits", tracking_uri="http://here", params={"lr": 0.1})

    library = follow(monkeypatch, make)
    metrics = [named.args[:2] + named.args[3:] for named in library.Metric.mock_calls]
    assert metrics == [("loss", 0.5, 5), ("loss", 0.25, 6)]
    library.MlflowClient.assert_called_once_with("http://here")
    client = library.MlflowClient()
    assert client.mock_calls == [
        call.update_run("0" * 32, status="RUNNING"),
        call.log_batch("0" * 32, [library.Metric(), library.Metric()]),
        call.set_terminated("0" * 32, "FAILED"),
    ]
    client = follow(monkeypatch, make, is_new=True).MlflowClient()
    experiment = client.get_experiment_by_name("digits").experiment_id
    client.create_run.assert_called_once_with(experiment, run_name="descent")
    run_id = str(client.create_run().info.run_id)
    client.log_param.assert_called_once_with(run_id, "lr", 0.1)
    client.set_terminated.assert_called_once_with(run_id, "FAILED")


class LibraryError(Exception):
    """An error of MLflow."""


def test_a_database_that_mlflow_cannot_use_is_refused_without_its_password(monkeypatch):
    library = MagicMock()
    library.exceptions.MlflowException = LibraryError
    library.MlflowClient.side_effect = LibraryError("unsupported: postgresql://me:secret@db/runs.")
    monkeypatch.setattr(importlib, "import_module", lambda module: library)
    with pytest.raises(DefinitionError, match=r"postgresql://…@db/runs\..* install all of mlflow"):
        MLflow("digits", tracking_uri="postgresql://me:secret@db/runs")


def test_prometheus_knows_how_far_a_run_is(inproc_session, manager):
    pytest.importorskip("prometheus_client")
    callback = jobrunner.callbacks.Prometheus()

    def value(series, **labels):
        return callback.registry.get_sample_value(series, {"job": "descent", **labels})

    class Looks:
        is_essential = True

        def on_epoch(self, epoch, seconds, metrics):
            assert (value("jobrunner_epoch"), value("jobrunner_running")) == (epoch, 1)

    manager = MultiNodeCheckpointManager(manager.path, save=manager.save_policy, asynchronous=False)
    JobRunner(build(5), manager, callbacks=[callback, Looks()]).run(inproc_session)
    assert value("jobrunner_metric", name="loss") == LOSSES[4]
    assert (value("jobrunner_saved_epoch"), value("jobrunner_running")) == (5, 0)
    assert (value("jobrunner_losses_total"), value("jobrunner_failed_saves_total")) == (0, 0)
