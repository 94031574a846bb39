"""Training loops to run with and without offloading: ``python -m actoffload.integrations.examples.NAME``."""
