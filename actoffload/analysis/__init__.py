"""Offline: estimates, recompute-offload-keep curves, benchmarks of a disk, and the machine they ran on."""
