"""Which cores a copy thread may run on."""

from __future__ import annotations

import contextlib
import os


def use_every_core_of_this_process() -> None:
    """Lets the calling thread run on every core that some thread of this process may run on.

    A thread starts with the mask of the thread that made it. Engines on CPU pin their threads to one core each, the
    main one included, so all copy threads would share a core with it. The union of all masks is what the process was
    given. Does nothing where the system does not tell.
    """
    with contextlib.suppress(OSError):
        cores: set[int] = set()
        for thread_id in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has just ended
                cores |= os.sched_getaffinity(int(thread_id))
        os.sched_setaffinity(0, cores)
