"""What users' own tests can use: faults on demand, exact comparison, contract suites.

- `FaultyFiles`: a file system that fails, dies, or kills its process at the k-th operation;
- `assert_identical`: equal in type, dtype, byte order, memory order and bits;
- `jobrunner.testing.contracts`, `jobrunner.testing.policies`: suites that replacements of our parts
  must pass.
"""

from __future__ import annotations

from jobrunner.testing.faults import FaultyFiles, PowerCutError
from jobrunner.testing.identity import assert_identical

__all__ = ["FaultyFiles", "PowerCutError", "assert_identical"]
