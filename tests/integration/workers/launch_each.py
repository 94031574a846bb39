"""Call ``accelerate launch --config_file FILE`` for one file after the other, in one process."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate.commands import launch


def main() -> None:
    for file in map(Path, sys.argv[1:]):
        rank = ["-m", "tests.integration.workers.launched_rank", file.stem]
        sys.argv[1:] = ["--config_file", str(file), *rank]
        launch.main()


if __name__ == "__main__":
    main()
