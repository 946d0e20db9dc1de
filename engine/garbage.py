"""Keeps Python's cyclic garbage collector from stalling steps."""

from __future__ import annotations

import gc
import threading
import weakref

_lock = threading.Lock()
_alive = 0


def freeze_while_alive(owner: object) -> None:
    """Leave out of garbage collection what exists now, until `owner` and all others given to this are gone.

    With torch and transformers imported, a full collection looks at 300,000 objects that stay anyway: 130 ms, twice in
    a thousand steps of 5 ms. What has no cycles is freed as ever; cyclic garbage of before waits until `owner` is gone.
    """
    global _alive
    gc.collect()
    with _lock:
        _alive += 1
        gc.freeze()
    weakref.finalize(owner, _release).atexit = False


def _release() -> None:
    global _alive
    with _lock:
        _alive -= 1
        if not _alive:
            gc.unfreeze()
