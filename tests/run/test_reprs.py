"""What a prompt and a notebook show for managers, results and failed tasks; a job: `define/test_drawing.py`."""

import xml.etree.ElementTree as ET

import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskFailedError,
    epoch_limiter,
)
from tests.jobs import counter


def test_a_manager_is_one_line_at_a_prompt_and_a_table_in_a_notebook(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "<b>&runs")
    JobRunner(counter(3), manager).run(inproc_session)
    line = repr(manager)
    assert line.startswith("<MultiNodeCheckpointManager of /")
    assert "\n" not in line
    root = ET.fromstring(manager._repr_html_())  # a name that was a tag would be an element of it
    assert "b" not in {it.tag for it in root.iter()}
    assert "3, the newest of 4" in "".join(root.itertext())


def test_a_manager_whose_directory_cannot_be_read_shows_why(tmp_path):
    (tmp_path / "_log").mkdir()
    (tmp_path / "_log" / "0000000000.json").write_text("no entry")
    assert "cannot be read" in MultiNodeCheckpointManager(tmp_path)._repr_html_()
    missing = MultiNodeCheckpointManager(tmp_path / "none")
    assert "none" in missing._repr_html_()


def test_a_failed_task_shows_a_notebook_the_frames_of_its_own_code(inproc_session):
    with Job("fails") as job:
        Task(lambda: 1 // 0, node=Node("a"), name="divide")
    epoch_limiter(job, 1)
    with pytest.raises(TaskFailedError) as caught:
        JobRunner(job).run(inproc_session)
    error = caught.value
    text = "\n".join(error._render_traceback_())
    assert text.startswith("TaskFailedError: Task 'divide' (node 'a'")
    assert "in <lambda>\n    Task(lambda: 1 // 0, " in text
    assert text.count("File ") == 1
