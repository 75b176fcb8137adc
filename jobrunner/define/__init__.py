"""What users write: nodes, blobs, tasks, groups and jobs. No I/O, no Dask."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
