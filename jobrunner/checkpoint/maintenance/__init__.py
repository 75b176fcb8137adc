"""Tools for a directory that no run is using: copy, inspect, repair."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
