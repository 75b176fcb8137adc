"""How a blob gets to disk and back, and what a crash leaves.

A checkpoint directory has a log, ``_log``, and stores: one Zarr group for each node and epoch, such as
``trainer:0.5``. An epoch exists if, and only if, an entry of the log records it. Entries are created
only if absent, so of two runs one wins, and no store is ever written under a name that was used before.
Rows of histories lie in arrays of their own; a record says how many of them count (`history_writer.py`).

**To disk.** Epochs are saved in groups; the worker's threads go on with the next epochs meanwhile.

1. *Due*. Workers run several epochs without the client, if they know which are due: then
   `run/saver.py: Saver.capture_rhythm` tells them before. Else the client asks the policy after each epoch
   (`save_policies.py: SaveEvery.is_due`), and the workers to capture it (`Saver.save`).
2. *Capture*, on each worker, between two epochs: `worker_save.py: SaveQueue.capture` has the blobs
   encoded (`node_capture.py: capture_nodes`, `encoding/encoded_blobs.py: encode_blobs`) as trees and
   arrays. It refers to arrays at rest, which a task copies before it changes them, and copies all
   others.
3. *Group*: when the one before is recorded, `run/save_groups.py: SaveGroups` takes all that waits.
   Its thread calls `run/saver.py: Saver._record` for the steps from here on.
4. *Order*, on the client: `directory_run.py: DirectoryRun.order` names the stores. The commit before
   has claimed these names, or else a ``claim`` entry does now: `log/log_writer.py: LogWriter.claim`.
5. *Write*, on each worker: `worker_save.py: SaveQueue.write`. For each store `store/layout.py: lay_out`
   plans the files, and `store/store_writer.py: StoreWriter` makes directories, arrays' documents and
   chunks; chunks that have not changed are hard links to the node's store before. The root document,
   with size and digest of each chunk, comes last.
6. *Flush*: `storage/posix.py: PosixFiles.making_durable`, once for all stores of the group.
7. *Receipts*: `worker_save.py: Receipt`, one for each store, with the SHA-256 of its root document.
8. *Commit*: `directory_run.py: DirectoryRun.commit` checks the receipts and appends a ``commit``
   entry (a few, if what the stores contain changes within the group). It records the longest prefix
   of the group that is whole, gives up what the policy does not keep (`retention.py:
   Retention.choose`), and claims the names of what comes next.
9. *Delete*: `retention.py: Sweeper` removes what was given up, root documents first.

A save that is waited for has no capture: `SaveQueue.save` encodes and writes while no task runs.

| a crash of the client, or a power cut, after | leaves | and the next run |
|---|---|---|
| due, capture, group | no stores; at most claimed names | goes on from the newest recorded epoch |
| order | claimed names, without stores | names its stores ``node.epoch.rN`` up to there |
| part of write | stores cut short: no root document, or chunks that are not on disk | deletes them |
| write, flush, receipts | whole stores that no entry records | deletes them too |
| one of several commits | epochs recorded up to there, whole stores of the others | goes on from these epochs, deletes the others |
| commit, before the client knows | recorded epochs | goes on from them |
| part of delete | stores that the log gave up, whole or in part | deletes them |

If a worker dies instead, the same run goes on from the newest recorded epoch; what the others have
written of the group is deleted in the background. How is it known what to delete? `retention.py:
Retention.start_run` looks at the directory when a run begins. A store whose name was claimed, and that
is neither recorded nor set aside, counts for nothing: `log/state.py: State.is_left_over`. A store whose
name no entry has claimed is not ours, and stays. If another run has taken the directory over meanwhile,
`log/log_writer.py: LogWriter.check_held` raises before the order and before the commit, and the entry of
the commit, whose number is taken by then, is refused.

**Back.**

1. *Decide*, on the client: `run/resume.py: decide` chooses the epoch from one look at the log. Then the
   run takes the directory (`directory_run.py: DirectoryRun.start`, a ``run`` entry).
2. *Plan*: `load_plan.py: plan_load` says which stores each node reads. It opens none of them, unless
   a blob is divided anew between other nodes, or the entry that says what they contain is lost.
3. *Read*, on each node's worker: `worker_load.py: NodeLoad.read` compares the root document with the
   SHA-256 in the record, and each chunk with its digest in that document, and decodes the blobs:
   `store/store_reader.py: StoreReader.load`, `encoding/decode.py: Decoder.decode`.
4. *Barrier*: nothing changes before all nodes have read and verified (`worker_load.py: load_group`).
5. *Replace*: `workspace/workspace.py: Workspace.apply`. Objects that init tasks make get their states
   afterwards: `worker_load.py: load_waiting_states`.
6. *Rewind*: only now entries set aside what the run does not go on from: damaged epochs
   (`directory_run.py: DirectoryRun.set_aside`), then later ones (`DirectoryRun.rewind`).

If something is not what was written, no blob is replaced, and the run decides again without that epoch.
A crash before these entries leaves all epochs as they were recorded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
