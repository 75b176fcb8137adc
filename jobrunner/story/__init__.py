"""What runs did, told from one model: by the log of their directory, and while they run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
