"""Measurements of the library; see README.md here. Results are kept under ``results/``."""
