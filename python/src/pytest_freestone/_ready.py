"""Disks that are prepared before a test needs them, and removed or renewed after it, while other
tests run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from pytest_freestone._images import Image
from pytest_freestone._mounts import Mounted

if TYPE_CHECKING:
    from freestone import Fork

_T = TypeVar("_T")

#: Longest wait for a disk that a thread prepares or removes, in seconds.
_WAIT_MAX: Final = 180.0


class Service(Protocol):
    """A program that runs on a disk, such as a database server."""

    def power_off(self) -> None:
        """Ends the program at once, after the power of its disk was cut."""

    def power_on(self) -> None:
        """Starts the program again, after its disk was mounted again."""

    def close(self) -> None:
        """Ends the program in order to remove its disk, whose content is not needed any more."""


class ServiceRecipe(Protocol):
    """How to start a service on a mounted disk. Equal recipes start equal services."""

    def start(self, directory: Path) -> Service:
        """Starts the service and returns when it can be used."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What a test needs: equal recipes lead to equal disks."""

    image: Image
    """Base of the fork."""
    is_mounted: bool
    """Mount the file system."""
    power_cut: bool
    """Keep unflushed writes apart, so that a power cut can lose them."""
    service: ServiceRecipe | None = None
    """What runs on the mounted disk."""
    is_renewed: bool = False
    """Use the disk for further tests, with its first content. Only for a disk whose object no test
    gets: a test could change more than its content."""


@dataclass
class Prepared:
    """A disk, for one test."""

    recipe: Recipe
    disk: Fork
    mounted: Mounted | None = None
    service: Service | None = None
    test: str = ""
    """The test that has the disk, for messages."""
    has_failed: bool = False
    """True if the test has failed, and may hold files until the end of the session."""


class Ready:
    """Prepares and removes disks in threads. A thread lives as long as its work, so that a test may
    fork.

    Used by the thread of the tests only. Bounds: ``limit`` disks are ready or being prepared, one
    more if it was renewed, and ``limit`` are being removed; a further removal waits.
    """

    def __init__(
        self,
        prepare: Callable[[Recipe], Prepared],
        renew: Callable[[Prepared], bool],
        remove: Callable[[Prepared], None],
        limit: int,
    ) -> None:
        """Args: how to prepare, renew and remove a disk, and the number of disks that may be ready;
        0 uses no threads.
        """
        self._prepare = prepare
        self._renew = renew
        self._remove = remove
        self._limit = limit
        self._stock: deque[tuple[Recipe, Future[Prepared]]] = deque()
        self._removals: list[tuple[Prepared, Future[None]]] = []
        self.failures: list[str] = []
        """What went wrong in threads, for the end of the session. Disks that could not be removed
        end with the server, and their mounts with the directory of the session."""

    def take(self, recipe: Recipe) -> Prepared:
        """Returns a disk: a ready one, or a new one.

        Raises:
            Exception: The disk cannot be prepared.
        """
        for index, (key, future) in enumerate(self._stock):
            if key != recipe:
                continue
            try:
                prepared = future.result(timeout=_WAIT_MAX)
            except Exception:  # The second attempt, below, reports its own error.
                del self._stock[index]
                break
            del self._stock[index]
            return prepared
        return self._prepare(recipe)

    def want(self, recipe: Recipe) -> None:
        """Prepares disks for the next tests.

        Removes ready disks of other recipes where the limit requires it.
        """
        if self._limit == 0:
            return
        missing = self._limit - sum(key == recipe for key, _ in self._stock)
        for _ in range(missing):
            if len(self._stock) >= self._limit and not self._drop_other(recipe):
                return
            self._stock.append((recipe, _in_thread(lambda: self._prepare(recipe))))

    def _drop_other(self, recipe: Recipe) -> bool:
        for index, (key, future) in enumerate(self._stock):
            if key != recipe and future.done():
                del self._stock[index]
                if future.exception() is None:
                    self.remove(future.result())
                return True
        return False

    def give_back(self, prepared: Prepared) -> None:
        """Takes back the disk of a test: renews it for the next one, or removes it."""
        recipe = prepared.recipe
        # The tests use one disk, so one more than the limit makes up for it.
        has_room = len(self._stock) <= self._limit
        if recipe.is_renewed and not prepared.has_failed and self._limit > 0 and has_room:
            self._stock.append((recipe, _in_thread(lambda: self._renewed(prepared))))
        else:
            self.remove(prepared)

    def _renewed(self, prepared: Prepared) -> Prepared:
        test, prepared.test = prepared.test, ""
        if self._renew(prepared):
            return prepared
        prepared.test = test
        self._note(prepared, _try(lambda: self._remove(prepared)))
        return self._prepare(prepared.recipe)

    def remove(self, prepared: Prepared) -> None:
        """Removes a disk. Failures are noted."""
        if self._limit == 0:
            self._note(prepared, _try(lambda: self._remove(prepared)))
            return
        self._collect(self._limit)
        self._removals.append((prepared, _in_thread(lambda: self._remove(prepared))))

    def _collect(self, most: int) -> None:
        """Waits until fewer than ``most`` removals run."""
        waiting: list[tuple[Prepared, Future[None]]] = []
        for index, (prepared, future) in enumerate(self._removals):
            left = len(self._removals) - index + len(waiting)
            if not future.done() and left < max(most, 1):
                waiting.append((prepared, future))
                continue
            try:
                self._note(prepared, future.exception(timeout=_WAIT_MAX))
            except TimeoutError:
                self.failures.append(
                    f"{prepared.test}: its disk is not removed after {_WAIT_MAX:g} s"
                )
        self._removals = waiting

    def _note(self, prepared: Prepared, error: BaseException | None) -> None:
        if error is not None and not prepared.has_failed:
            self.failures.append(f"{prepared.test or 'a disk for the next test'}: {error}")

    def close(self) -> None:
        """Removes the ready disks, and waits for all threads."""
        while self._stock:
            _, future = self._stock.popleft()
            try:
                prepared = future.result(timeout=_WAIT_MAX)
            except Exception:  # noqa: S112 - no test has asked for this disk.
                continue
            self.remove(prepared)
        self._collect(0)


def _try(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # The caller reports it.
        return error
    return None


def _in_thread(work: Callable[[], _T]) -> Future[_T]:
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # The caller of `result` gets it.
            future.set_exception(error)

    threading.Thread(target=run, name="freestone-ready", daemon=True).start()
    return future
