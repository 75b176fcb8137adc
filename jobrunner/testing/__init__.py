"""What users' own tests can use: faults on demand, exact comparison, contract suites.

- `FaultyFiles`: a file system that fails, dies, or kills its process at the k-th operation;
- `FaultyObjects`: an object store that does, kept in a directory;
- `Struck`: a task's function that once kills or stops its worker, or raises;
- `assert_identical`: equal in type, dtype, byte order, memory order and bits;
- `jobrunner.testing.contracts`, `jobrunner.testing.policies`, `jobrunner.testing.codecs`: suites
  that replacements of our parts, and codecs, must pass.
"""

from __future__ import annotations

from jobrunner.testing.faults import FaultyFiles, FaultyObjects, PowerCutError
from jobrunner.testing.identity import assert_identical
from jobrunner.testing.strikes import Struck

__all__ = ["FaultyFiles", "FaultyObjects", "PowerCutError", "Struck", "assert_identical"]
