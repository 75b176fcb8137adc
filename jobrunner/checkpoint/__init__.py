"""Managers, which save and load epochs; policies: when to save, which epochs to keep."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
