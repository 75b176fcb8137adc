"""For users' own tests: faults to inject, exact comparison, contract suites.

- `FaultyFiles`: a file system whose k-th operation fails or kills the process;
- `FaultyObjects`: an object store in a directory, with the same faults;
- `Struck`: a task function that once kills or stops its worker, or raises;
- `assert_identical`: compares type, dtype, byte order, memory order and bits;
- `jobrunner.testing.contracts`, `jobrunner.testing.codec_contract`: test suites for your own metadata
  handlers and codecs.
"""

from __future__ import annotations

from jobrunner.testing.faults import FaultyFiles, FaultyObjects, PowerCutError, Struck
from jobrunner.testing.identity import assert_identical

__all__ = ["FaultyFiles", "FaultyObjects", "PowerCutError", "Struck", "assert_identical"]
