"""A recorded trace of a run, and the numbers in it."""
