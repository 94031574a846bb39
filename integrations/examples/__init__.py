"""Loops that run as they are, with and without offloading: ``python -m actoffload.integrations.examples.NAME``."""
