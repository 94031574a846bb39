"""Names that `autotune` still imports; `planning.search` is the planner."""
