"""Readers that were saved under former names of their classes go on with the next record."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task, epoch_limiter
from tests.golden.make_readers import plain, readers

GOLDEN = Path(__file__).with_name("readers")

LEFT: dict[str, list[Any]] = {
    "indexed": [[116, 117, 113], [101, 102, 110], [118, 111, 109], [112, 114, 104], [100, 108]],
    "shard": [112, 113, 114, 115, 116, 117, 118, 119],
    "ahead": [
        *([111, 109], [117, 112], [101, 110], [107, 119], [100, 108], [118, 102]),
        *([113, 114], [106, 104]),
    ],
    "limited": [[104, 105], [106, 107], [108, 109], [110, 111], [112, 113]],
    "stream": [[100, 121]],
}


@pytest.mark.parametrize("name", LEFT)
def test_a_reader_goes_on_where_it_was(name: str, inproc_session: Session, tmp_path: Path) -> None:
    with Job("read") as job:
        with job.init_group:
            Task(partial(readers().__getitem__, name), outputs=name, node="a", name="open")
        Task(plain, [name], outputs="left", node="a", workspace_type="global")
    epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager(tmp_path, load_path=GOLDEN)
    JobRunner(job, manager, missing="init").run(inproc_session)
    assert inproc_session.fetch(Node("a")["left"]) == LEFT[name]
