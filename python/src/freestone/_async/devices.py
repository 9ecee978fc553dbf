"""Devices of a server: disks, forks, snapshots, templates, and their mounts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, Union, cast

from freestone import _keys, errors
from freestone._async.connection import ALLOCATION, CHANGED, Buffer, Connection, connect_nbd
from freestone._keys import KeyValue
from freestone._types import Change, Export, Extent, PowerCut

if TYPE_CHECKING:
    from freestone._async.core import Core
    from freestone._async.server import Server

_Path = Union[str, "os.PathLike[str]"]
_Self = TypeVar("_Self", bound="Device")
_SelfMount = TypeVar("_SelfMount", bound="Mount")
#: Longest duration of a mount or unmount, in seconds.
_MOUNT_TIMEOUT: Final = 120.0


class Device:
    """A device of a server. The end of a ``with`` block removes one that this object created.

    Attributes:
        name: Its name, also that of its NBD export.
        kind: Its kind, such as ``ram`` or ``fork``.
        size: Its size when this object was made or last set, in bytes.
        warnings: What the server remarked when the device was created.
    """

    def __init__(self, server: Server, core: Core, info: dict[str, Any]) -> None:
        """Made by the methods of :class:`Server`."""
        self._server = server
        self._core = core
        self.name = str(info["name"])
        self.kind = str(info.get("kind", ""))
        self.size = int(info.get("disksize", 0))
        self.warnings = tuple(str(each) for each in info.get("warnings", ()))
        self._base = cast("str | None", info.get("base") or info.get("origin"))
        self._exports = cast("list[Export]", info.get("exports", []))
        self._is_owned = bool(info.get("created", True))

    def __repr__(self) -> str:
        return f"<freestone.{type(self).__name__} {self.name}, {self.size} bytes>"

    @property
    def server(self) -> Server:
        """The server of the device."""
        return self._server

    @property
    def uri(self) -> str:
        """NBD URI of the device, of a Unix socket if there is one.

        Raises:
            NoDeviceError: It is not published at an NBD address.
        """
        uris = [export.get("uri", "") for export in self._exports if export.get("uri")]
        if not uris:
            raise errors.NoDeviceError(
                f"{self.name}: is not published at an NBD address; call publish()"
            )
        return next((uri for uri in uris if uri.startswith("nbd+unix")), uris[0])

    async def ensure_published(self) -> str:
        """Publishes the device at the address of the server, unless it is published. Returns its
        URI.
        """
        try:
            return self.uri
        except errors.NoDeviceError:
            return await self.publish()

    async def stat(self) -> dict[str, Any]:
        """Returns the statistics of the device, as the method ``stat`` does."""
        return cast("dict[str, Any]", await self._core.call("stat", name=self.name))

    async def get(self, attr: str) -> Any:
        """Returns an attribute.

        Raises:
            InvalidError: The device has no such attribute.
        """
        return (await self._core.call("get", name=self.name, attr=attr))[attr]

    async def set(self, **attrs: KeyValue) -> dict[str, Any]:
        """Sets attributes, all or none, and returns their new values. Values are those of
        :meth:`Server.create`.

        Raises:
            InvalidError: An attribute or a value is invalid.
            BusyError: The attribute is fixed for the life of the device.
        """
        result = await self._core.call("set", name=self.name, attrs=_keys.texts(attrs))
        self.size = int(result.get("disksize", result.get("size", self.size)))
        return cast("dict[str, Any]", result)

    async def publish(
        self, nbd: str | None = None, *, read_only: bool = False, **params: Any
    ) -> str:
        """Publishes the device at an NBD address and returns its URI.

        Args:
            nbd: ``unix:PATH`` or ``tcp:HOST:PORT``, at which the server listens if it does not yet;
                by default the server's own address.
            read_only: Refuse writes of its clients.
            params: More parameters of the method ``publish``, such as ``max_clients``.

        Raises:
            AddressError: The server cannot listen there.
        """
        address = self._core.address(nbd, True)
        if address is None:
            raise errors.InvalidError(f"{self.name}: the server has no NBD address; name one")
        given = {"read_only": read_only or None, **params}
        result = await self._core.call("publish", name=self.name, nbd=address, **given)
        uri = str(result["uri"])
        self._exports = [*self._exports, {"address": str(result["address"]), "uri": uri}]
        return uri

    async def unpublish(self, *, force: bool = False) -> None:
        """Removes all exports of the device, which keeps its content.

        Args:
            force: End the connections of clients.

        Raises:
            BusyError: Clients are connected.
        """
        await self._core.disconnect(self.name)
        await self._core.call("unpublish", name=self.name, force=force)
        self._exports = []

    async def open(
        self,
        *,
        client: str = "auto",
        contexts: tuple[str, ...] = (ALLOCATION,),
        timeout: float = 60.0,
    ) -> Connection:
        """Connects to the device, which is published for it if it is not yet. See
        :func:`connect_nbd`.

        While a connection is open, ``rewind``, ``reset`` and ``remove`` of the device need
        ``force``.
        """
        uri = await self.ensure_published()
        return await connect_nbd(uri, client=client, contexts=contexts, timeout=timeout)

    async def remove(self, *, force: bool = False) -> None:
        """Removes the device; its content in memory is lost.

        Args:
            force: End the connections of clients.

        Raises:
            BusyError: Clients are connected, or other devices are based on it.
        """
        await self._core.disconnect(self.name)
        await self._core.call("remove", name=self.name, force=force)
        self._is_owned = False
        self._exports = []

    async def __aenter__(self: _Self) -> _Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mount in list(self._core.mounts.get(self.name, ())):
            await mount.unmount()
        if not self._is_owned or not self._core.is_running:
            return
        try:
            await self.remove(force=True)
        except errors.NoDeviceError:
            pass  # Removed already, by another object or client.
        except (errors.NoServerError, errors.ServerEndedError):
            # The end of the server is reported by the error that ends the block.
            if error is None:
                raise


class Disk(Device):
    """A device with content: read, written, snapshotted, mounted.

    The short forms ``read``, ``write``, ``zero``, ``trim``, ``flush`` and ``extents`` share a
    connection that the server object keeps, and that verbs of this object close where they need to.
    If the server ends the connection, as a power cut does, the next request makes another one; a
    read is also repeated.
    """

    async def _connection(self) -> Connection:
        return await self._core.connection(self.name, await self.ensure_published())

    async def read(self, offset: int, length: int) -> bytes:
        """Returns ``length`` bytes from ``offset`` on. See :meth:`Connection.read`."""
        try:
            return await (await self._connection()).read(offset, length)
        except errors.ConnectionLostError:
            # A power cut ends connections a moment after the reply to the last write.
            return await (await self._connection()).read(offset, length)

    async def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        """Writes ``data`` at ``offset``; with ``fua`` durably. See :meth:`Connection.write`."""
        await (await self._connection()).write(offset, data, fua=fua)

    async def zero(self, offset: int, length: int, *, fua: bool = False) -> None:
        """Fills a range with zeroes. See :meth:`Connection.zero`."""
        await (await self._connection()).zero(offset, length, fua=fua)

    async def trim(self, offset: int, length: int) -> None:
        """Discards a range. See :meth:`Connection.trim`."""
        await (await self._connection()).trim(offset, length)

    async def flush(self) -> None:
        """Returns when all writes that were answered are durable. See :meth:`Connection.flush`."""
        await (await self._connection()).flush()

    async def extents(self, offset: int = 0, length: int | None = None) -> list[Extent]:
        """Returns data, zeroes and holes of a range, in order. See :meth:`Connection.extents`."""
        return await (await self._connection()).extents(offset, length)

    async def snapshot(self, name: str | None = None, **keys: KeyValue | None) -> Snapshot:
        """Takes a snapshot while the device is in use.

        Args:
            name: Its name; by default one that no other process chooses.
            keys: Keys of the snapshot, for the copies of a file; see :meth:`Server.create`.

        Raises:
            NotSupportedError: The device is read-only or zoned.
            TimedOutError: Writes in flight did not end within 10 s. Nothing has changed.
        """
        return (await self._server.snapshot({self.name: name}, **keys))[0]

    async def rewind_to(self, snapshot: str | Snapshot, *, force: bool = False) -> Fork:
        """Returns a ram device or fork to a snapshot of it, and returns the fork that takes its
        place and name.

        Args:
            snapshot: The snapshot, which stays.
            force: End the connections of clients.

        Raises:
            BusyError: Clients are connected, or other devices are based on the device.
        """
        await self._core.disconnect(self.name)
        to = snapshot if isinstance(snapshot, str) else snapshot.name
        await self._core.call("rewind", name=self.name, to=to, force=force)
        owned, self._is_owned = self._is_owned, False
        fork = cast(Fork, await self._server.device(self.name))
        fork._is_owned = owned
        return fork

    async def reset(self, *, force: bool = False) -> None:
        """Wipes a ram or null device; of a fork, discards the changes.

        Args:
            force: Do so although clients are connected, which may have cached the old content.

        Raises:
            BusyError: Clients are connected, or other devices are based on it.
            NotSupportedError: The kind cannot be reset.
        """
        await self._change("reset", force)

    async def _change(self, verb: str, force: bool) -> None:
        await self._core.disconnect(self.name)
        if self._core.mounts.get(self.name):
            # The command unmounts before and mounts again.
            options = ["--force"] if force else []
            await self._core.run(verb, self.name, *options, timeout=_MOUNT_TIMEOUT)
        else:
            await self._core.call(verb, name=self.name, force=force)

    async def save(self, file: _Path, *, whole_base: bool = False, force: bool = False) -> None:
        """Saves a ram device, fork or snapshot to a file, which :meth:`Server.restore` reads.

        Args:
            file: The file. An existing saved file is replaced once the new one is complete.
            whole_base: Hash the whole base of a fork, so that ``restore`` can verify it.
            force: Replace also a file that is not a saved device.

        Raises:
            ExistsError: The file is something else.
            NoSpaceError: The disk is full. The old file is unchanged.
        """
        path = _keys.path_text(file)
        await self._core.call(
            "save", names=[self.name], file=path, whole_base=whole_base, force=force
        )

    async def mark(self, text: str) -> int:
        """Writes a mark to the log of a device that records, and returns its entry, from 1.

        Raises:
            NotSupportedError: The device was created without ``record``.
        """
        return int((await self._core.call("mark", name=self.name, text=text))["entry"])

    async def power_cut(
        self,
        *,
        seed: int | None = None,
        at: int | str | None = None,
        after: str | None = None,
    ) -> PowerCut:
        """Cuts the power of a device with ``power_cut``: loses a part of the unflushed writes and
        ends connections.

        Args:
            seed: Decides which blocks are lost; the same seed loses the same blocks. By default
                each cut has another.
            at: Return to a point of the record instead: after this number of entries, or a mark.
            after: Cut later: after ``"1000writes"`` or ``"3flushes"``; ``"none"`` ends the count.

        Raises:
            NotSupportedError: The device was created without ``power_cut``.
            InvalidError: ``at`` and ``after`` exclude each other, or the log has no such point.
        """
        point = None if at is None else str(at)
        result = await self._core.call(
            "power-cut", name=self.name, seed=seed, at=point, after=after
        )
        return PowerCut(
            seed=int(result.get("seed", 0)),
            kept_blocks=int(result.get("kept_blocks", 0)),
            lost_blocks=int(result.get("lost_blocks", 0)),
            entries=result.get("entries"),
            after=result.get("after"),
            connections_ended=int(result.get("connections_ended", 0)),
        )

    async def mount(
        self,
        directory: _Path | None = None,
        *,
        via: str | None = None,
        fs: str | None = None,
        options: str | None = None,
    ) -> Mount:
        """Mounts the file system of the device. Needs root, and ublk, the kernel's NBD client or
        nbdfuse.

        ``rewind`` and ``reset`` of this object then unmount, change the content and mount again.

        Args:
            directory: Mount point; by default a new directory, which is removed afterwards.
            via: ``ublk``, ``nbd`` or ``nbdfuse``; by default the first that is available.
            fs: Type of the file system; by default as mount(8) finds it.
            options: Options of mount(8); with ``ro``, the device is attached read-only.

        Raises:
            FreestoneError: The device cannot be attached, or has no file system that the kernel
                knows.
        """
        made = tempfile.mkdtemp(prefix="freestone-mount-") if directory is None else None
        path = os.path.abspath(directory) if directory is not None else str(made)
        arguments = ["mount", self.name, path]
        for option, value in (("--via", via), ("--fs", fs), ("--options", options)):
            if value is not None:
                arguments += [option, value]
        try:
            await self._core.run(*arguments, timeout=_MOUNT_TIMEOUT)
        except BaseException:
            if made is not None:
                os.rmdir(made)
            raise
        mount = Mount(self, self._core, path, is_made=made is not None)
        self._core.mounts.setdefault(self.name, []).append(mount)
        return mount


class Fork(Disk):
    """A writable disk over a base."""

    @property
    def base(self) -> str:
        """Name of the base."""
        return self._base or ""

    async def rewind(self, *, force: bool = False) -> None:
        """Discards the changes: the fork shows its base again at once.

        Args:
            force: Do so although clients are connected, which may have cached the old content. A
                device with ``power_cut`` is not rewound while clients are connected.

        Raises:
            BusyError: Clients are connected, or other devices are based on it.
        """
        await self._change("rewind", force)

    async def changes(self) -> list[Change]:
        """Returns the ranges that the fork itself holds, in order."""
        return await _changes(self)

    async def save_changes(self, file: _Path, *, force: bool = False) -> None:
        """Writes the changes of a fork of a file or image as a qcow2 overlay on that file.

        Args:
            file: The overlay. An existing one is replaced once the new one is complete.
            force: Replace also a file that is not an overlay.

        Raises:
            ExistsError: The file is something else.
        """
        await self._core.call("delta.save", name=self.name, file=_keys.path_text(file), force=force)

    async def apply_changes(self, file: _Path, *, force: bool = False) -> None:
        """Writes the changes of an overlay on the same base to the fork.

        Args:
            file: The overlay.
            force: Do so although clients are connected or the fork has changes already.
        """
        await self._core.disconnect(self.name)
        await self._core.call(
            "delta.apply", name=self.name, file=_keys.path_text(file), force=force
        )


class Snapshot(Disk):
    """The content of a device at one moment."""

    @property
    def origin(self) -> str:
        """Name of the device that the snapshot was taken of."""
        return self._base or ""

    async def fork(self, name: str | None = None, **keys: Any) -> Fork:
        """Creates a writable disk over the snapshot. See :meth:`Server.fork`."""
        return await self._server.fork(self.name, name, **keys)

    async def changes(self) -> list[Change]:
        """Returns the ranges that the snapshot itself preserves, in order."""
        return await _changes(self)


class Template(Device):
    """An export whose connections each have a fork of their own. :meth:`open` makes such a
    connection.
    """

    @property
    def base(self) -> str:
        """Name of the base."""
        return self._base or ""


class Mount:
    """A mounted file system. The end of a ``with`` block unmounts it.

    Attributes:
        path: The mount point.
        device: The mounted device.
    """

    def __init__(self, device: Disk, core: Core, path: str, *, is_made: bool) -> None:
        """Made by :meth:`Disk.mount`."""
        self.device = device
        self.path = path
        self._core = core
        self._is_made = is_made
        self._is_mounted = True

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<freestone.Mount {self.device.name} at {self.path}>"

    async def unmount(self, *, force: bool = False) -> None:
        """Unmounts the file system, which writes what is cached.

        Args:
            force: If the server is dead or hangs: unmount lazily, and lose unwritten data.

        Raises:
            BusyError: A process uses the file system; the message names it.
        """
        if not self._is_mounted:
            return
        options = ["--force"] if force else []
        # An error without a device: it was unmounted by hand.
        with contextlib.suppress(errors.NoDeviceError):
            await self._core.run("umount", self.path, *options, timeout=_MOUNT_TIMEOUT)
        self._is_mounted = False
        self._core.mounts[self.device.name].remove(self)
        if self._is_made:
            os.rmdir(self.path)

    async def __aenter__(self: _SelfMount) -> _SelfMount:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.unmount(force=not self._core.is_running)


async def _changes(disk: Disk) -> list[Change]:
    shown = await disk.server.call("delta.show", name=disk.name)
    rows = [Change(row["offset"], row["length"], bool(row.get("zero"))) for row in shown["rows"]]
    if len(rows) == shown["extents"]:
        return rows
    # The method shows only the first 4096.
    connection = await disk.open(client="own", contexts=(ALLOCATION, CHANGED))
    async with connection:
        changed = await connection.extents(context=CHANGED)
        allocation = await connection.extents()
    changes: list[Change] = []
    index = 0
    for extent in changed:
        if not extent.flags & 1:
            continue
        start, end = extent.offset, extent.offset + extent.length
        while (
            index < len(allocation) and allocation[index].offset + allocation[index].length <= start
        ):
            index += 1
        at = index
        while at < len(allocation) and allocation[at].offset < end:
            part = allocation[at]
            first, last = max(start, part.offset), min(end, part.offset + part.length)
            previous = changes[-1] if changes else None
            if previous and previous.zero == part.is_zero and sum(previous[:2]) == first:
                changes[-1] = Change(previous.offset, last - previous.offset, part.is_zero)
            else:
                changes.append(Change(first, last - first, part.is_zero))
            at += 1
    return changes
