"""Power cuts below the disks of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_freestone._ready import Prepared


@dataclass(frozen=True)
class Cut:
    """What a power cut did to the unflushed blocks of the disks of a test."""

    seed: int
    """The seed that decided, for a repetition."""
    kept_blocks: int
    """Unflushed blocks that were kept."""
    lost_blocks: int
    """Unflushed blocks that were lost."""


class PowerCutter:
    """The value of the fixture ``freestone_power_cut``: a function.

    A call cuts the power of each disk of the test, one after the other. File systems of them are
    then unmounted and mounted again at the same place, which replays their journals, as a reboot
    does. Database servers of the test's fixtures are killed before, and started again after it;
    connections of ``freestone_sqlite`` are closed.
    """

    def __init__(self, disks: Sequence[Prepared], mount: Callable[[Prepared], None]) -> None:
        """Args: the disks of the test, which may still change, and how to mount one again."""
        self._disks = disks
        self._mount = mount

    def __call__(self, seed: int | None = None, *, stop: Callable[[], object] | None = None) -> Cut:
        """Cuts the power, and returns when the file systems are mounted again.

        Args:
            seed: Decides which blocks are lost. The same seed loses the same blocks of the same
                writes. By default each cut has another seed.
            stop: Called when the power is off: kills the programs of the test that use the file
                systems, and closes its files. What they wrote after their last flush is lost.

        Raises:
            RuntimeError: The test has no disk. pytest_freestone.types.ProgramError: A program still
                uses a file system, which the message names; or the file system cannot be mounted
                again.
        """
        if not self._disks:
            raise RuntimeError(
                "freestone_power_cut: the test has no disk; request freestone_mount or another one"
            )
        kept = lost = 0
        for prepared in self._disks:
            # All disks are cut with one seed, so that one number repeats the cut.
            cut = prepared.disk.power_cut(seed=seed)
            seed = cut.seed
            kept, lost = kept + cut.kept_blocks, lost + cut.lost_blocks
        for prepared in self._disks:
            if prepared.service is not None:
                prepared.service.power_off()
        if stop is not None:
            stop()
        for prepared in self._disks:
            if prepared.mounted is None:
                continue
            prepared.mounted.unmount()
            prepared.mounted = None
            self._mount(prepared)
            if prepared.service is not None:
                prepared.service.power_on()
        return Cut(seed or 0, kept, lost)
