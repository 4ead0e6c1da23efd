"""kvtier's log lines, where vLLM's own go."""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Gives kvtier's loggers vLLM's handlers and level: by itself vLLM shows no lines but its own.

    Whoever has configured the `kvtier` logger, or has told vLLM not to configure logging, is left alone.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and ours.level == logging.NOTSET:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
