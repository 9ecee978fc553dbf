"""Waits for processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def stop(pid: int | None) -> None:
    """Stops a process, and returns when all its threads have stopped."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)


def wait_for_end(pid: int, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < until, f"process {pid} still runs"
        time.sleep(0.01)
