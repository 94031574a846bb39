"""``python -m actoffload.cli``: the same as the console script."""

from . import main

main()
