"""Host memory: the page-locked pool, its best-fit allocator, the CPU allocator, and the process's limits."""
