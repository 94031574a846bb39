"""Bytes on disk: the spool, its files and its engines."""
