"""The source of all that waits. ``python/unasync.py`` makes the package ``_sync`` of it."""
