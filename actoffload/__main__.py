"""``python -m actoffload``: the same as the console script."""

from .tools import main

main()
