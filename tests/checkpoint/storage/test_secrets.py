"""Credentials show nowhere: not in errors, logs, records, pickles, nor in what commands print."""

from __future__ import annotations

import datetime as dt
import logging
import os
import pickle
import traceback
from functools import partial
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
    f"s3://bucket/runs#{CANARY}",
]


NO_RETRY: Any = {"max_retries": 0, "retry_timeout": dt.timedelta(0)}


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
    for call in (
        lambda: MultiNodeCheckpointManager(url),
        lambda: MultiNodeCheckpointManager(tmp_path, load_path=url),
    ):
        with pytest.raises(DefinitionError, match="not repeated") as caught:
            call()
        assert CANARY not in told_by(caught.value)
    with pytest.raises((DefinitionError, OSError)) as caught:
        write_report(tmp_path, url)
    assert CANARY not in told_by(caught.value)


def test_the_url_of_a_directory_without_slashes_is_not_repeated() -> None:
    with pytest.raises(DefinitionError, match="not repeated") as caught:
        MultiNodeCheckpointManager(f"s3:{CANARY}")
    assert CANARY not in told_by(caught.value)


def test_no_command_repeats_the_credentials_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes a path, a file, a module or a name."""
    monkeypatch.chdir(tmp_path)
    url = URLS[1]
    Path("job.py").write_text("")
    calls = [["run", f"job.py:{url}", "--checkpoint", "runs"]]
    for name, command in main.commands.items():
        arguments = [it for it in command.params if isinstance(it, click.Argument)]
        options = [it for it in command.params if isinstance(it, click.Option) and not it.is_flag]
        calls.append([name, *[url] * len(arguments)])
        calls += [[name, *["x"] * len(arguments), it.opts[0], url] for it in options]
    for call in calls:
        for more in ([], ["--json"]):
            result = CliRunner().invoke(main, [*call, *more])
            assert CANARY not in result.output, (call, result.output)
            assert result.exit_code != 1 or len(call) == 1, (call, result.exception)
    assert len(calls) > 45
    assert os.listdir() == ["job.py"]


def test_no_secret_among_parameters_is_recorded_or_repeated() -> None:
    got = []

    @job
    def build(
        token: str,
        db: str,
        urls: list[str],
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
        return build(secret, url, [url], {"h": hosts}, [secret])

    first = build_with(CANARY)
    assert got == [(CANARY, url)]
    assert first.parameters == {
        **dict.fromkeys(("token", "api_keys"), "…"),
        "db": "postgres://…@h/x",
        "urls": ["postgres://…@h/x"],
        "tokens_by_host": {"h": {"token": "…", "max_token": 7, "user": "u"}},
        "num_tokens": 3,
        "tokenizer": "bpe",
        "pad_token": "<pad>",
    }
    then, now = describe(first.compile()), describe(build_with("another").compile())
    assert changes(then, now) == []
    then["parameters"]["tokens_by_host"] = {"h": {"token": CANARY}}  # as a stranger recorded it
    told = str(changes(then, now))
    assert "'user'" in told
    assert CANARY not in told


def test_an_endpoint_with_a_password_is_not_shown_by_errors(
    environment: None, caplog: pytest.LogCaptureFixture
) -> None:
    from obstore.store import from_url

    caplog.set_level(logging.DEBUG)
    files = ObjectFiles("s3://bucket/runs", partial(from_url, retry_config=NO_RETRY))
    for call in (
        lambda: files.read("s3://bucket/runs/x"),
        lambda: files.list_names(files.root),
        MultiNodeCheckpointManager("s3://bucket/runs", files=files).epochs,
    ):
        with pytest.raises((OSError, CheckpointError), match=r"http://…@127\.0\.0\.1") as caught:
            call()
        assert CANARY not in told_by(caught.value)
    assert CANARY not in caplog.text


def test_pickles_of_sessions_managers_and_handlers_have_no_credentials(
    environment: None, inproc_session: Session
) -> None:
    """Managers and sessions belong to their process; the error for trying must not tell either."""
    from obstore.store import S3Store

    def with_keys(root: str) -> Any:
        """A store that pickles the credentials which it was given."""
        key = os.environ["AWS_SECRET_ACCESS_KEY"]
        return S3Store("bucket", access_key_id="AKIA", secret_access_key=key, retry_config=NO_RETRY)

    files = ObjectFiles("s3://bucket/runs", with_keys)
    manager = MultiNodeCheckpointManager("s3://bucket/runs", files=files)
    with pytest.raises(OSError, match="127"):
        files.read("s3://bucket/runs/x")  # opens the store
    assert CANARY in str(cloudpickle.dumps(with_keys(files.root)))
    assert CANARY not in str(cloudpickle.dumps([files, manager.directory.handler]))
    for thing in (manager, inproc_session):
        with pytest.raises(TypeError) as refused:
            cloudpickle.dumps(thing)
        assert CANARY not in told_by(refused.value)


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
        told.append(repr(JobRunner(job, manager).run(inproc_session)))
        files = manager.directory.files
        told.append(str(cloudpickle.dumps(files)))
        told += [str(files.read(f"{path}/{name}")) for name in dict(files.walk(path))]
        for command in (["ls", path], ["info", path, "2"], ["verify", path], ["fsck", path]):
            result = CliRunner().invoke(main, [*command, "--json"])
            assert result.exit_code == 0, result.output
            told.append(result.output)
    assert len(told) > 30
    assert CANARY not in f"{told}{caplog.text}"


def test_the_address_of_a_scheduler_is_shown_without_credentials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "jobrunner")
    for address in (f"tcp://user:{CANARY}@127.0.0.1:1", f"ws://127.0.0.1:1/?token={CANARY}"):
        with pytest.raises((DefinitionError, ExecutionError)) as caught:
            Session.connect(address, timeout=0.1)
        error = caught.value
        assert CANARY not in f"{error}{error!r}{pickle.loads(pickle.dumps(error)).args}"
    assert CANARY not in caplog.text
