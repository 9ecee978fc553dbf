"""A server: starts the program or uses one that runs, and calls the verbs of its control socket."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar, Union, cast

from freestone import _keys, _process, _program, errors
from freestone._async._io import connect_unix, monotonic, sleep
from freestone._async.control import Control
from freestone._async.core import Core
from freestone._async.devices import Device, Disk, Fork, Snapshot, Template
from freestone._keys import KeyValue
from freestone._types import DeviceInfo

#: First and longest pause between two looks at a process that starts or ends, in seconds.
_PAUSE_MIN: Final = 0.001
_PAUSE_MAX: Final = 0.02
#: Longest wait for the orderly end of a server, in seconds: with a state, the program itself waits
#: up to 5 minutes for its last save and a minute for flushes.
_END_TIMEOUT: Final = 30.0
_END_TIMEOUT_OF_STATE: Final = 400.0

_Self = TypeVar("_Self", bound="Server")
_Path = Union[str, "os.PathLike[str]"]


class Server:
    """A server of devices.

    ``with Server() as server`` starts the program in a private directory and ends it. The program
    also ends with this process, however that ends. A server may be used by several threads or tasks
    at a time: each call in flight has a connection to itself. A child made by ``os.fork()`` may
    call verbs over connections of its own, and does not end the server.
    """

    def __init__(
        self,
        *,
        program: _Path | None = None,
        devices: Sequence[str] = (),
        options: Sequence[str] = (),
        state: _Path | None = None,
        directory: _Path | None = None,
        timeout: float = 10.0,
        call_timeout: float = 60.0,
        job_timeout: float = 3600.0,
    ) -> None:
        """Describes a server, which :meth:`start` or ``with`` starts.

        Args:
            program: Path of the program; by default ``$FREESTONE_PROGRAM``, then the program of
                this package, then ``PATH``.
            devices: Devices in the form of ``freestone serve``, such as
                ``golden=file,path=golden.img,readonly=yes``. They are published.
            options: More options of ``freestone serve``.
            state: State directory, which keeps devices for the next server.
            directory: Directory for the sockets; by default a new one, which is removed at the end.
            timeout: Longest duration of the start, in seconds.
            call_timeout: Longest wait for the answer of a verb, in seconds.
            job_timeout: Longest wait for a verb that moves data, in seconds.
        """
        self._core = Core(program, call_timeout, job_timeout)
        self._devices = list(devices)
        self._options = list(options)
        self._state = None if state is None else os.path.abspath(state)
        self._directory = None if directory is None else os.path.abspath(directory)
        self._timeout = timeout

    def __repr__(self) -> str:
        state = "running" if self.is_running else "not running"
        return f"<freestone.Server {self.control or 'without a socket'}, {state}>"

    @property
    def control(self) -> str:
        """Path of the control socket; empty if the server is not started, or closed."""
        return self._core.control.path if self._core.control is not None else ""

    @property
    def nbd(self) -> str | None:
        """NBD address at which devices are published by default: ``unix:PATH`` or ``tcp:...``."""
        return self._core.nbd

    @property
    def pid(self) -> int | None:
        """Number of the process that this object started, or None."""
        return self._core.process.pid if self._core.process is not None else None

    @property
    def is_running(self) -> bool:
        """True between start and end, unless the process has ended by itself."""
        return self._core.is_running

    @property
    def call_timeout(self) -> float:
        """Longest wait for the answer of a verb and of short reads and writes, in seconds."""
        return self._core.call_timeout

    @call_timeout.setter
    def call_timeout(self, seconds: float) -> None:
        self._core.call_timeout = seconds

    @property
    def job_timeout(self) -> float:
        """Longest wait for a verb that moves data, such as ``save``, in seconds."""
        return self._core.job_timeout

    @job_timeout.setter
    def job_timeout(self, seconds: float) -> None:
        self._core.job_timeout = seconds

    def messages(self) -> str:
        """Returns what the program has written to stderr, at most the last 64 KiB."""
        return self._core.process.messages() if self._core.process is not None else ""

    async def start(self: _Self) -> _Self:
        """Starts the program and returns when all devices exist and clients can connect.

        Raises:
            ServerStartError: There is no program, or it ended or was not ready in time.
            InvalidError: The server runs already, or the path of the directory is too long for
                sockets.
        """
        if self._core.control is not None:
            raise errors.InvalidError("the server runs already")
        program = _program.find(self._core.program)
        private = None
        directory = self._directory
        if directory is None:
            private = _process.PrivateDirectory()
            directory = private.path
        else:
            _process.check_directory(directory)
            os.makedirs(directory, mode=0o700, exist_ok=True)
        control, nbd = os.path.join(directory, "control.sock"), os.path.join(directory, "nbd.sock")
        arguments = [
            "serve",
            *self._devices,
            "--control",
            control,
            "--nbd",
            f"unix:{nbd}",
            "--exit-with-parent",
        ]
        if self._state is not None:
            arguments += ["--state", self._state]
        elif not self._devices and not any(
            option.startswith("--config") for option in self._options
        ):
            # Without this empty file, the program makes a RAM disk.
            arguments += ["--config", os.devnull]
        try:
            process = _process.ServerProcess(program, arguments + self._options, directory, private)
        except BaseException:
            if private is not None:
                private.remove()
            raise
        try:
            await self._wait_until_ready(process, control)
        except BaseException:
            await self._end(process, 0.0)
            raise
        self._core.process = process
        self._core.nbd = f"unix:{nbd}"
        self._core.control = Control(control)
        return self

    async def _wait_until_ready(self, process: _process.ServerProcess, control: str) -> None:
        until = monotonic() + self._timeout
        pause = _PAUSE_MIN
        while True:
            # The program makes this socket last.
            try:
                (await connect_unix(control, self._timeout)).close()
                return
            except errors.NoServerError:
                pass
            status = process.status()
            if status is not None:
                said = process.messages()
                message = f"{process.program} ended with status {status} before it was ready"
                reason = _process.reason(said)
                message += f": {reason}" if reason else ""
                raise errors.ServerStartError(message, stderr=said, status=status)
            if monotonic() > until:
                message = f"{process.program} was not ready within {self._timeout:g} s"
                raise errors.ServerStartError(message, stderr=process.messages())
            await sleep(pause)
            pause = min(pause * 2, _PAUSE_MAX)

    async def _end(self, process: _process.ServerProcess, timeout: float) -> tuple[int, str]:
        """Waits for the end of the program, and kills it after ``timeout``.

        Returns:
            Its exit status and its messages.
        """
        until = monotonic() + timeout
        pause = _PAUSE_MIN
        status = process.status()
        try:
            while status is None and monotonic() < until:
                await sleep(pause)
                pause = min(pause * 2, _PAUSE_MAX)
                status = process.status()
        finally:
            if status is None:
                process.send(signal.SIGKILL)
            said = process.messages()
            process.reap()
        return -signal.SIGKILL if status is None else status, said

    async def close(self, timeout: float | None = None) -> None:
        """Ends the server, or only the connections to one that this object has not started.

        Args:
            timeout: Longest wait for an orderly end, in seconds, after which the server is killed;
                by default 30, and 400 with a state.

        Raises:
            ServerEndError: The server had ended by itself, was killed, or reports lost content.
        """
        await self._close(timeout, is_ending=False)

    async def _close(self, timeout: float | None, *, is_ending: bool) -> None:
        if self._core.process is not None and self._core.process.is_owner:
            await self._unmount()
        await self._core.disconnect_all()
        process, self._core.process = self._core.process, None
        if process is None or not process.is_owner:
            return
        default = _END_TIMEOUT if self._state is None else _END_TIMEOUT_OF_STATE
        limit = default if timeout is None else timeout
        if not is_ending and limit > 0:
            process.send(signal.SIGTERM)
        status, said = await self._end(process, limit)
        if status != 0:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            reason = _process.reason(said)
            message = f"the server (pid {process.pid}) {how}" + (f": {reason}" if reason else "")
            raise errors.ServerEndError(message, stderr=said, status=status)

    async def _unmount(self) -> None:
        """Unmounts what objects of this server mounted, which would fail without the server."""
        for mount in [mount for mounts in self._core.mounts.values() for mount in mounts]:
            try:
                await mount.unmount(force=not self.is_running)
            except errors.FreestoneError:
                # A process uses the file system. The mount is hidden, and ends with that process.
                with contextlib.suppress(errors.FreestoneError):
                    await mount.unmount(force=True)

    async def shutdown(self, *, force: bool = False) -> None:
        """Saves and flushes everything, and ends the server, also one that this object has not
        started.

        Args:
            force: End the server even if there is no room to save devices with ``keep=yes``.

        Raises:
            NoSpaceError: The last save has no room; the server continues.
            ServerEndError: Content was lost.
        """
        await self.call("shutdown", force=force)
        # A second request, such as a signal, would end the server without its last save.
        await self._close(None, is_ending=True)

    async def __aenter__(self: _Self) -> _Self:
        if self._core.control is None:
            await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except errors.ServerEndError:
            # The error that ends the block is the reason, or more important.
            if error is None:
                raise

    async def call(self, method: str, /, **params: Any) -> Any:
        """Calls a method of the control socket and returns its result, as the reference of the
        methods describes it.

        A call that is cancelled, or interrupted by Ctrl-C, closes its connection, and the server
        cancels the verb.

        Args:
            method: Name of the method, such as ``stat`` or ``delta.show``.
            params: Its parameters as JSON values; those that are None are omitted. Sizes are texts
                with a unit (``"2G"``), and relative paths start at the server's directory.

        Raises:
            FreestoneError: The subclass for the ``errno`` of the server's refusal.
            NoServerError: The server does not run, or this object was closed.
            ServerEndedError: The server ended during the call, which may have had its effect.
            TimedOutError: There was no answer within ``call_timeout`` or ``job_timeout``.
        """
        return await self._core.call(method, **params)

    async def stat(self) -> dict[str, Any]:
        """Returns the statistics of the server and its devices, as the method ``stat`` does."""
        return cast("dict[str, Any]", await self.call("stat"))

    async def create(
        self,
        name: str,
        kind: str,
        *,
        publish: bool = True,
        if_absent: bool = False,
        **keys: KeyValue | None,
    ) -> Disk:
        """Creates a device.

        Args:
            name: Its name, 1 to 255 bytes.
            kind: Its kind: ``ram``, ``null``, ``file``, ``qcow2``, ``image``, ``nbd``, ``rbd``.
            publish: Export the device at the addresses of the server, so that it can be read and
                written.
            if_absent: Accept an existing device of that name with the same keys, which is not
                removed at the end of a ``with`` block.
            keys: Keys of the kind. An int of a size key is a number of bytes, a multiple of 1024; a
                bool is yes or no; a list is joined as the key requires; None is omitted. Relative
                paths start at the directory of this process.

        Raises:
            InvalidError: A key or value is invalid; the message names the allowed ones.
            ExistsError: The name is taken.
        """
        if publish:
            keys = {**keys, "publish": True}
        text = _keys.device_text(name, kind, keys)
        return Disk(
            self, self._core, await self.call("create", device=text, if_absent=if_absent or None)
        )

    async def fork(
        self,
        base: str | Device,
        name: str | None = None,
        *,
        nbd: str | None = None,
        publish: bool = True,
        if_absent: bool = False,
        **keys: KeyValue | None,
    ) -> Fork:
        """Creates a writable disk over a read-only base.

        Args:
            base: A file with ``readonly``, a qcow2 image, an image of a store, or a snapshot.
            name: Its name; by default one that no other process chooses.
            nbd: NBD address to publish the fork at, ``unix:PATH`` or ``tcp:HOST:PORT``; by default
                that of the server.
            publish: False to publish it nowhere.
            if_absent: Accept an existing fork with the same settings, which is not removed at the
                end of ``with``.
            keys: ``size``, ``mem_limit``, ``mem_min``, ``full``, ``faults``, ``seed``,
                ``power_cut``, ``power_cut_unit``, ``record``; see :meth:`create`.

        Raises:
            NoDeviceError: The base does not exist.
            ExistsError: The name is taken.
            BusyError: The base is not read-only.
        """
        base = _name(base)
        name = name or _keys.generated_name(base)
        params = {
            "if_absent": if_absent or None,
            "nbd": self._core.address(nbd, publish),
            **_keys.texts(keys),
        }
        info = await self._core.first_of("forks", "fork", base=base, name=name, **params)
        return Fork(self, self._core, info)

    async def forks(
        self,
        base: str | Device,
        name: str,
        count: int,
        *,
        nbd: str | None = None,
        publish: bool = True,
        **keys: KeyValue | None,
    ) -> list[Fork]:
        """Creates ``count`` forks, all or none.

        Args:
            base: As for :meth:`fork`.
            name: Their names; ``%n`` is the number, from 0 on. Without ``%n``, ``-N`` is appended.
            count: Their number, 1 to 65536.
            nbd: As for :meth:`fork`; ``%n`` is the number.
            publish: As for :meth:`fork`.
            keys: As for :meth:`fork`; ``%n`` is the number.
        """
        params = {"nbd": self._core.address(nbd, publish), **_keys.texts(keys)}
        given = {"base": _name(base), "name": name, "count": count, **params}
        found = await self._core.list_of("forks", "fork", **given)
        return [Fork(self, self._core, info) for info in found]

    async def template(
        self,
        base: str | Device,
        name: str | None = None,
        *,
        ttl: int | None = None,
        nbd: str | None = None,
        **keys: KeyValue | None,
    ) -> Template:
        """Creates a template: each connection to it has a fork of its own, which ends with the
        connection.

        Args:
            base: As for :meth:`fork`.
            name: Name of the export; by default one that no other process chooses.
            ttl: Longest time of a connection, in seconds.
            nbd: As for :meth:`fork`.
            keys: As for :meth:`fork`, for each of the forks.
        """
        base = _name(base)
        name = name or _keys.generated_name(base)
        params = {"ttl": ttl, "nbd": self._core.address(nbd, True), **_keys.texts(keys)}
        given = {"base": base, "name": name, "template": True, **params}
        return Template(self, self._core, await self._core.first_of("forks", "fork", **given))

    async def snapshot(
        self, origins: Mapping[Any, str | None], **keys: KeyValue | None
    ) -> list[Snapshot]:
        """Takes snapshots of several devices at one moment, or none at all.

        Args:
            origins: The name of the snapshot for each origin, a device or the name of one; None
                chooses a name.
            keys: Keys of all these snapshots, such as ``chunk_size``; see :meth:`create`.

        Returns:
            The snapshots, in the order of ``origins``.
        """
        names = {_name(origin): name for origin, name in origins.items()}
        texts = _keys.texts(keys)
        wanted = [
            {"origin": origin, "name": name or _keys.generated_name(origin), **texts}
            for origin, name in names.items()
        ]
        found = await self._core.list_of("snapshots", "snapshot", snapshots=wanted)
        return [Snapshot(self, self._core, {"kind": "snapshot", **info}) for info in found]

    async def restore(
        self, file: _Path, name: str | None = None, *, publish: bool = True
    ) -> list[Disk]:
        """Creates the devices of a saved file.

        Args:
            file: File that :meth:`Disk.save` or ``freestone save`` wrote.
            name: Name of the device, if the file has only one; by default its name when it was
                saved.
            publish: Export the devices at the address of the server.
        """
        path = _keys.path_text(file)
        found = await self._core.list_of("devices", "restore", file=path, name=name)
        disks = [cast(Disk, self._object(info, created=True)) for info in found]
        if publish and self.nbd is not None:
            for disk in disks:
                await disk.publish()
        return disks

    async def device(self, name: str) -> Device:
        """Returns a device of the server, by its kind a :class:`Fork`, :class:`Snapshot`,
        :class:`Template` or :class:`Disk`. The end of a ``with`` block does not remove it.

        Raises:
            NoDeviceError: There is no such device.
        """
        for device in await self.devices(name):
            if device.name == name:
                return device
        raise errors.NoDeviceError(f"{name}: no such device")

    async def devices(self, pattern: str | None = None) -> list[Device]:
        """Returns the devices whose name matches: ``*`` is any characters, ``?`` is one."""
        found = await self._core.list_of("devices", "list", pattern=pattern)
        return [self._object(info, created=False) for info in found]

    async def describe(self, pattern: str | None = None) -> list[DeviceInfo]:
        """Returns what the method ``list`` tells about the devices whose name matches."""
        found = await self._core.list_of("devices", "list", pattern=pattern)
        return cast("list[DeviceInfo]", found)

    def _object(self, info: dict[str, Any], *, created: bool) -> Device:
        kinds: dict[str, type[Device]] = {"fork": Fork, "snapshot": Snapshot, "template": Template}
        kind = kinds.get(str(info.get("kind")), Disk)
        return kind(self, self._core, {"created": created, **info})

    @classmethod
    async def connect(
        cls: type[_Self],
        control: _Path | None = None,
        *,
        program: _Path | None = None,
        call_timeout: float = 60.0,
        job_timeout: float = 3600.0,
    ) -> _Self:
        """Returns a server that runs already. See :func:`connect`."""
        server = cls(program=program, call_timeout=call_timeout, job_timeout=job_timeout)
        path = os.path.abspath(control if control is not None else _default_control())
        server._core.control = Control(path)
        try:
            addresses: list[str] = (await server.stat())["server"]["addresses"]
        except BaseException:
            await server.close()
            raise
        local = [address for address in addresses if address.startswith("unix:")]
        server._core.nbd = next(iter(local + addresses), None)
        return server


async def connect(
    control: _Path | None = None,
    *,
    program: _Path | None = None,
    call_timeout: float = 60.0,
    job_timeout: float = 3600.0,
) -> Server:
    """Returns a server that runs already. Its ``close`` ends only the connections.

    Args:
        control: Path of its control socket; by default ``$FREESTONE_CONTROL``, else
            ``control.sock`` in ``$XDG_RUNTIME_DIR/freestone``, else in ``/tmp/freestone-UID``.
        program: Path of the program, for mounts; see :class:`Server`.
        call_timeout: Longest wait for the answer of a verb, in seconds.
        job_timeout: Longest wait for a verb that moves data, in seconds.

    Raises:
        NoServerError: No server answers there.
    """
    timeouts = {"call_timeout": call_timeout, "job_timeout": job_timeout}
    return await Server.connect(control, program=program, **timeouts)


def _default_control() -> str:
    named = os.environ.get("FREESTONE_CONTROL")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = os.path.join(runtime, "freestone") if runtime else f"/tmp/freestone-{os.getuid()}"  # noqa: S108 - the default of the program
    return os.path.join(directory, "control.sock")


def _name(device: Any) -> str:
    return device.name if isinstance(device, Device) else str(device)
