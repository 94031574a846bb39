"""A rank as ``accelerate launch`` starts it: it sends its environment to `launched`, and ends with the status there.

That process imports the frameworks once, for the ranks of all launches.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Client, Connection


def connected() -> Connection:
    """A connection to `launched`."""
    while True:
        try:
            return Client(os.path.join(os.environ["RANKS_DIRECTORY"], "socket"))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.1)  # `launched` listens after its imports


with connected() as warm:
    warm.send((dict(os.environ), sys.argv[1]))
    sys.exit(warm.recv())
