"""Stateful, epoch-by-epoch jobs on Dask that checkpoint to Zarr and resume.

``docs/design/README.md`` lists the packages in layers. Each imports only those above it there, and
only through their ``__init__.py``, which says what the package does and lists what others may use.

Names are imported on first use, so ``import jobrunner`` is quick.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
