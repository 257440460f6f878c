"""Bytes that all requests share: those of bodies, and those of answers."""

from __future__ import annotations

from collections.abc import Callable


class Room:
    """So many bytes, and how many of them are taken."""

    def __init__(self, limit_bytes: int, elsewhere: Callable[[], int] = lambda: 0) -> None:
        self._limit_bytes = limit_bytes
        self._elsewhere = elsewhere
        """The bytes that are held elsewhere, which count, too."""
        self.taken_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self.taken_bytes + self._elsewhere()

    @property
    def is_full(self) -> bool:
        return self.used_bytes > self._limit_bytes

    def take(self, size_bytes: int, own_bytes: int = 0) -> bool:
        """Take some more; false if there are not so many left.

        One that is alone, with nothing taken but its ``own_bytes``, may have what it needs:
        otherwise there would be no way to serve it.
        """
        used_bytes = self.taken_bytes + self._elsewhere()
        if used_bytes > own_bytes and used_bytes + size_bytes > self._limit_bytes:
            return False
        self.taken_bytes += size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes


class Share:
    """What one request has of a room."""

    __slots__ = ("_room", "taken_bytes")

    def __init__(self, room: Room) -> None:
        self._room = room
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> bool:
        if not self._room.take(size_bytes, self.taken_bytes):
            return False
        self.taken_bytes += size_bytes
        return True

    def fits(self, size_bytes: int) -> bool:
        """Whether so many could be taken now."""
        fits = self.take(size_bytes)
        if fits:
            self._room.give(size_bytes)
            self.taken_bytes -= size_bytes
        return fits

    def give_back(self) -> None:
        self._room.give(self.taken_bytes)
        self.taken_bytes = 0
