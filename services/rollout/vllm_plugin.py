"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

# pyright: reportUnknownMemberType=false

import ctypes
import multiprocessing
import os
import signal
from contextlib import suppress

BACKEND = "libra"
"""Name of our weight-transfer backend in vLLM's registry."""
PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the backend known, and tie a child process of vLLM to its parent's life.

    vLLM may call this more than once in a process.
    """
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
    )

    with suppress(ValueError):  # Registered already.
        WeightTransferEngineFactory.register_engine(
            BACKEND, "services.rollout.vllm_backend", "SegmentTransfer"
        )
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, by whatever means.

    The signal is sent when the *thread* that started this process ends, so whoever starts an
    engine keeps that thread alive.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # It died before the signal was armed.
        os.kill(os.getpid(), signal.SIGKILL)
