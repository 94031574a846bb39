"""``python -m actoffload``: the same as the console script."""

from .cli import main

main()
