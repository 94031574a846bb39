"""The version, which setup and package read from here alone."""

__version__ = "0.1.0"
