"""Run a job: init or resume, then epochs, then upload, download and exit."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
