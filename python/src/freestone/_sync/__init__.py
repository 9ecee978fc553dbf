"""Made by ``python/unasync.py`` from the package ``_async``, except ``_io.py``."""
