"""The version, in its one place: the build and ``jobrunner --version`` read it here."""

__version__ = "0.1.0.dev0"
