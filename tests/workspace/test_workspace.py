"""One node's blobs."""

import numpy as np
import pytest

from jobrunner.errors import BlobNotFoundError, ExecutionError
from jobrunner.workspace import BlobUpdate, Workspace, WorkspaceView, settle


@pytest.fixture
def workspace():
    workspace = Workspace("trainer:0", frozenset({"conn"}))
    workspace.globals.update(w=1, conn="socket")
    workspace.private["batch"] = [1, 2]
    return workspace


def test_a_missing_blob_is_an_error_that_says_node_blob_and_what_there_is(workspace):
    with pytest.raises(
        BlobNotFoundError, match=r"'trainer:0' has no blob 'v'.*'batch', 'conn', 'w'"
    ):
        workspace.lookup("v")
    with pytest.raises(BlobNotFoundError, match="none"):
        Workspace("a").lookup("v")


def test_an_update_sets_blobs_without_copying_values(workspace):
    values = np.arange(3)
    workspace.apply(BlobUpdate({"w": values, "box": [values]}))
    assert workspace.globals["w"] is values
    assert workspace.value("box")[0] is values
    assert workspace.globals["conn"] == "socket"


def test_a_replacing_update_drops_all_other_global_blobs(workspace):
    blobs = workspace.globals
    workspace.apply(BlobUpdate({"w": 2}, replace=True))
    assert workspace.globals == {"w": 2}
    assert workspace.globals is blobs  # programs refer to it


def test_a_change_gets_the_blob_opened_and_sets_what_it_returns(workspace):
    workspace.put("box", settle([[np.zeros(2), [1]]]))

    def change(box):
        box[0][0] = 7
        return [*box, 3]

    workspace.apply(BlobUpdate({}, changes={"box": change, "new": lambda value: value}))
    array, *rest = workspace.lookup("box")
    assert array.tolist() == [7, 0]
    assert rest == [[1], 3]
    assert workspace.lookup("new") is None


def test_a_result_is_searched_in_several_groups_and_a_missing_one_is_an_error(workspace):
    workspace.retained["resume"] = {("t", 0): 5}
    assert workspace.result(["init", "resume"], "t", 0) == 5
    with pytest.raises(ExecutionError, match=r"trainer:0/t.*was not retained.*output\(\)"):
        workspace.result(["init"], "t", 0)
    workspace.retained["init"] = {("t", 0): TypeError("no copy")}
    with pytest.raises(TypeError, match="no copy"):
        workspace.result(["init"], "t", 0)


def test_tasks_see_the_blobs_through_a_read_only_mapping(workspace):
    workspace.put("w", settle([np.zeros(2)]))
    seen = WorkspaceView(workspace)
    assert sorted(seen) == ["batch", "conn", "w"]
    assert len(seen) == 3
    assert "w" in seen
    assert "v" not in seen
    assert seen.get("v") is None
    seen["batch"].append(3)
    assert workspace.private["batch"] == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        seen["w"][0] = 1
    with pytest.raises(TypeError):
        seen["w"] = 1
