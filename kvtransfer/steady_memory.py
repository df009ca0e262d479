"""Keeps Python's and C's memory management out of a worker's steady state.

Two defaults cost a process that moves KV: a full collection looks at every object that was ever imported (100 ms with
torch, and every thread waits), and glibc gives freed buffers of a few hundred KiB back to the kernel, which hands them
out again zeroed, page by page, for the next frame.
"""

import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1  # parameters of mallopt(3)
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3

MAX_KEPT_BYTES: Final = 256 << 20
"""Freed memory at the end of a heap that is kept for the next allocation."""
THREAD_HEAP_BYTES: Final = 64 << 20
"""What glibc reserves at once for blocks of a thread other than the main one. The trim threshold alone does not keep
such a heap: it goes back to the kernel as soon as it is empty, unless the one below it is to leave this much room."""
MAX_HEAP_BLOCK_BYTES: Final = 32 << 20
"""Larger blocks come from the kernel each time; glibc takes no higher limit than this."""


def settle_memory() -> bool:
    """To be called once, when all that stays is loaded. False if this C library has no mallopt: then only the collector
    is told."""
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, MAX_KEPT_BYTES) and mallopt(_M_TOP_PAD, THREAD_HEAP_BYTES)
    return bool(mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES) and kept)
