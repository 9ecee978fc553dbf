"""Results: tuples with names, and the objects of the control socket as typed dictionaries."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

__all__ = ["Change", "DeviceInfo", "Export", "Extent", "PowerCut"]


class Extent(NamedTuple):
    """A range of an export with one state."""

    offset: int
    """Start, in bytes."""
    length: int
    """Length, in bytes."""
    flags: int
    """Flags of the metadata context."""

    @property
    def is_hole(self) -> bool:
        """In ``base:allocation``: true if nothing is stored."""
        return bool(self.flags & 1)

    @property
    def is_zero(self) -> bool:
        """In ``base:allocation``: true if the range reads as zeroes."""
        return bool(self.flags & 2)


class Change(NamedTuple):
    """A range that a fork or snapshot itself holds."""

    offset: int
    """Start, in bytes."""
    length: int
    """Length, in bytes."""
    zero: bool
    """True if the range was filled with zeroes or discarded."""


class PowerCut(NamedTuple):
    """The result of a power cut."""

    seed: int
    """The seed that decided, for a repetition."""
    kept_blocks: int
    """Unflushed blocks that the cut kept; 0 for a cut that is still to come."""
    lost_blocks: int
    """Unflushed blocks that the cut lost; 0 for a cut that is still to come."""
    entries: int | None
    """With ``at``: number of entries of the log that were replayed."""
    after: str | None
    """With ``after``: what has to happen before the cut, such as ``3 writes``."""
    connections_ended: int
    """Connections that the cut ended."""


class Export(TypedDict, total=False):
    """An export in the results of the server."""

    address: str
    uri: str
    read_only: bool
    default: bool
    template: bool
    connections: int
    allow: list[str]
    limits: dict[str, int]


class DeviceInfo(TypedDict, total=False):
    """A device in the result of ``list``; fields that a kind does not have are missing."""

    name: str
    kind: str
    disksize: int
    base: str
    exports: list[Export]
    orig_data_size: int
    compr_data_size: int
    comp_algorithm: str
    mem_used_total: int
    mem_limit: int
    mem_used_max: int
    same_pages: int
    own_mem_limit: int
    template: str
    status: str
    backing: dict[str, Any]
    progress: dict[str, Any]
    changed: dict[str, Any]
    withheld: bool
