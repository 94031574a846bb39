"""One step: which saved storage is which, in what order they come and go, what moves, and what was seen."""
