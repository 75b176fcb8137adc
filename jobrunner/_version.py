"""The version; the build and ``jobrunner --version`` read it from here."""

__version__ = "0.1.0"
