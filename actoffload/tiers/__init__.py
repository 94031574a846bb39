"""The life of one record, and its moves between device, host memory and disk."""
