"""Credentials show nowhere: not in errors, logs, records, pickles, nor in what commands print."""

from __future__ import annotations

import datetime as dt
import logging
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import click
import cloudpickle
import numpy as np
import pytest
from click.testing import CliRunner

from jobrunner import (
    CheckpointError,
    DefinitionError,
    ExecutionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    epoch_limiter,
    job,
)
from jobrunner.checkpoint import ObjectFiles
from jobrunner.cli import main
from jobrunner.compile import changes, describe
from jobrunner.story import write_report

CANARY = "cAnArY"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": f"AKIA{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}/secret",
    "AWS_SESSION_TOKEN": f"{CANARY}token",
    "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": f"http://user:{CANARY}@127.0.0.1:1",
    "AWS_ALLOW_HTTP": "true",
    "AZURE_STORAGE_ACCOUNT_KEY": f"{CANARY}key",
    "AZURE_STORAGE_SAS_KEY": f"sv=2020&sig={CANARY}",
}

URLS = [
    f"s3://AKIA:{CANARY}@bucket/runs",
    f"s3://AKIA:{CANARY}/with/slashes+@bucket/runs",
    f"s3:/AKIA:{CANARY}@bucket/runs",
    f"az://container/runs?sv=2020&sig={CANARY}",
    f"https://user:{CANARY}@host/runs",
    f" s3://AKIA:{CANARY}@bucket",
    f"simplecache::s3://AKIA:{CANARY}@bucket/runs",
    f"s3://AKIA%3A{CANARY}%40bucket/runs",
]


def told_by(error: BaseException) -> str:
    """Everything that an error shows or carries to another process."""
    shown = "".join(traceback.format_exception(error))
    return f"{shown}{error!r}{error}{pickle.loads(pickle.dumps(error)).args!r}"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    good = tmp_path / "good"
    MultiNodeCheckpointManager(good).run.start(["a"], {})
    for call in (
        lambda: MultiNodeCheckpointManager(url),
        lambda: MultiNodeCheckpointManager(good, load_path=url),
    ):
        with pytest.raises(DefinitionError, match="not repeated") as caught:
            call()
        assert CANARY not in told_by(caught.value)
        assert CANARY not in str(caught.value.args)
    for args in (["ls", url], ["diff", f"{url}@1", "@2"], ["copy", str(good), "all", url]):
        for more in ([], ["--json"]):
            result = CliRunner().invoke(main, [*args, *more])
            assert result.exit_code in (2, 6)
            assert CANARY not in result.output


@pytest.mark.parametrize("url", URLS[1:2])
def test_no_command_repeats_the_credentials_of_a_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes a path, a file, a module or a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    runs = ["--checkpoint", "runs"]
    tried = 0
    for name, command in main.commands.items():
        arguments = [it for it in command.params if isinstance(it, click.Argument)]
        calls = [[url] * len(arguments)]
        calls += [
            [*["x"] * len(arguments), it.opts[0], url]
            for it in command.params
            if isinstance(it, click.Option) and not it.is_flag
        ]
        calls += [[f"job.py:{url}", *runs]] if name == "run" else []
        for call in calls:
            for more in ([], ["--json"]):
                result = CliRunner().invoke(main, [name, *call, *more])
                assert CANARY not in result.output, (name, call, result.output)
                assert result.exit_code != 1 or not arguments, (name, call, result.exception)
                tried += 1
    assert tried > 90
    assert os.listdir(tmp_path) == ["job.py"]
    for path in (url, Path(url)):
        with pytest.raises((DefinitionError, OSError)) as caught:
            write_report(tmp_path, path)
        assert CANARY not in str(caught.value)


def test_no_secret_among_parameters_is_recorded_or_repeated() -> None:
    got = []

    @job
    def build(
        token: str,
        db: str,
        urls: list[str],
        credentials: dict[str, str],
        tokens_by_host: dict[str, dict[str, str | int]],
        api_keys: list[str],
        num_tokens: int = 3,
        tokenizer: str = "bpe",
        pad_token: str = "<pad>",
    ) -> Job:
        got.append((token, db))
        with Job("j") as made, Node("a"):
            Task(int, outputs="x")
        epoch_limiter(made, 1)
        return made

    url = f"postgres://u:{CANARY}@h/x"

    def build_with(secret: str) -> Job:
        hosts: dict[str, str | int] = {"token": secret, "max_token": 7, "user": "u"}
        return build(secret, url, [url], {"user": secret}, {"h": hosts}, [secret])

    first = build_with(CANARY)
    assert got == [(CANARY, url)]
    assert CANARY not in str(first.parameters)
    assert first.parameters == {
        **dict.fromkeys(("token", "credentials", "api_keys"), "…"),
        "db": "postgres://…@h/x",
        "urls": ["postgres://…@h/x"],
        "tokens_by_host": {"h": {"token": "…", "max_token": 7, "user": "u"}},
        "num_tokens": 3,
        "tokenizer": "bpe",
        "pad_token": "<pad>",
    }
    # A secret may change; that it was recorded by an earlier version is not repeated.
    then, now = describe(first.compile()), describe(build_with("another").compile())
    assert changes(then, now) == []
    hosts = {"h": {"token": CANARY, "max_token": 7, "user": "u"}}
    then["parameters"] |= {"token": CANARY, "tokens_by_host": hosts}
    assert changes(then, now) == []
    then["parameters"] |= {"db": f"x{url}", "tokens_by_host": {"h": {"token": CANARY}}}
    told = str(changes(then, now))
    assert "'user'" in told
    assert CANARY not in told


def test_an_endpoint_with_a_password_is_not_shown_by_errors(
    environment: None, caplog: pytest.LogCaptureFixture
) -> None:
    from obstore.store import from_url

    def once(root: str) -> Any:
        return from_url(root, retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(0)})

    caplog.set_level(logging.DEBUG)
    files = ObjectFiles("s3://bucket/runs", once)
    for call in (lambda: files.read("s3://bucket/runs/x"), lambda: files.list_names(files.root)):
        with pytest.raises(OSError, match=r"http://…@127\.0\.0\.1") as caught:
            call()
        assert CANARY not in told_by(caught.value)
    manager = MultiNodeCheckpointManager("s3://bucket/runs", files=files)
    with pytest.raises(CheckpointError) as failed:
        manager.epochs()
    assert CANARY not in told_by(failed.value)
    assert CANARY not in caplog.text


def test_pickles_of_sessions_managers_and_handlers_have_no_credentials(
    environment: None, inproc_session: Session
) -> None:
    """Managers and sessions belong to their process; the error for trying must not tell either."""
    from obstore.store import S3Store

    def once(root: str) -> Any:
        """A store that pickles the credentials which it was given."""
        return S3Store(
            "bucket",
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(0)},
        )

    files = ObjectFiles("s3://bucket/runs", once)
    manager = MultiNodeCheckpointManager("s3://bucket/runs", files=files)
    with pytest.raises(CheckpointError):
        manager.epochs()  # opens the store
    assert CANARY in str(cloudpickle.dumps(once(files.root)))
    whole, refused = [], []
    for thing in (files, manager.directory.handler, manager, inproc_session):
        try:
            whole.append(cloudpickle.dumps(thing))
        except TypeError as error:
            refused.append(told_by(error))
    assert len(whole) >= 2
    assert not [it for it in (*whole, *refused) if CANARY in str(it)]


def test_a_run_writes_and_prints_no_credentials_of_its_environment(
    environment: None,
    inproc_session: Session,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG, "jobrunner")
    with Job("j") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.arange(3), outputs="x")
        Task(lambda x: x + 1, inputs="x", outputs="x")
    epoch_limiter(job, 2)
    told = []
    for path in ("memory://canaries/runs", str(tmp_path / "runs")):
        manager = MultiNodeCheckpointManager(path)
        runner = JobRunner(job, manager)
        told += [str(runner.plan_resume()), repr(runner.run(inproc_session))]
        told += [
            repr(manager.open(2).record),
            repr(manager.directory.info_of(manager.record(2).run_number)),
        ]
        told.append(str(cloudpickle.dumps([manager.directory.files, manager.directory.path])))
        files = manager.directory.files
        told += [str(files.read(f"{path}/{name}")) for name in dict(files.walk(path))]
        for command in (["ls", path], ["info", path, "2"], ["verify", path], ["fsck", path]):
            for more in ([], ["--json"]):
                result = CliRunner().invoke(main, [*command, *more])
                assert result.exit_code == 0, result.output
                told.append(result.output)
    assert len(told) > 50
    assert not [text for text in (*told, caplog.text) if CANARY in text]


def test_the_address_of_a_scheduler_is_shown_without_credentials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "jobrunner")
    for address in (f"tcp://user:{CANARY}@127.0.0.1:1", f"ws://127.0.0.1:1/?token={CANARY}"):
        with pytest.raises((DefinitionError, ExecutionError)) as caught:
            Session.connect(address, timeout=0.1)
        assert CANARY not in f"{caught.value}{caught.value!r}"
        assert CANARY not in repr(pickle.loads(pickle.dumps(caught.value)).args)
    assert CANARY not in caplog.text
