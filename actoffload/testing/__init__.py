"""Tools to test this library and extensions of it: faulty engines, and the suite that every engine must pass."""
