"""For users' own tests: faults to inject, exact comparison, contract suites.

- `FaultyFiles`: a file system whose k-th operation fails, or ends or kills its process;
- `FaultyObjects`: an object store, kept in a directory, with the same faults;
- `Struck`: a task function that kills or stops its worker, or raises, once;
- `assert_identical`: equal in type, dtype, byte order, memory order and bits;
- `jobrunner.testing.contracts`, `jobrunner.testing.policies`, `jobrunner.testing.codecs`: suites
  for your own metadata handlers, policies and codecs.
"""

from __future__ import annotations

from jobrunner.testing.faults import FaultyFiles, FaultyObjects, PowerCutError, Struck
from jobrunner.testing.identity import assert_identical

__all__ = ["FaultyFiles", "FaultyObjects", "PowerCutError", "Struck", "assert_identical"]
