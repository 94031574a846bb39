"""Tools to test this library and what is built on it: faulty engines, and the suite that every engine must pass."""
