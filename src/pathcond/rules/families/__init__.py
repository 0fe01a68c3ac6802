"""The rules themselves, one file per family of operations."""
