"""What a prefix cache did since it was last asked, for those who want to know what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_CHANGES = 1024  # keys between two questions; with more, only the whole cache says what it holds


@dataclass(frozen=True)
class CacheChanges:
    """What changed, in this order: all keys went, when ``cleared``; ``removed`` went; ``stored`` came. None is in both.

    keys: all that the cache holds after them, where it was asked for or where ``lost`` says that the changes are not
    known.
    """

    cleared: bool = False
    removed: tuple[bytes, ...] = ()
    stored: tuple[bytes, ...] = ()
    keys: tuple[bytes, ...] | None = None
    lost: bool = False


class ChangeLog:
    """Collects changes, the last one of each key; at most ``max_changes``. The cache's lock guards it."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._changes: dict[bytes, bool] = {}  # whether the key is in the cache now
        self._cleared = False
        self._lost = False

    def stored(self, keys: Iterable[bytes]) -> None:
        """They are in the cache now."""
        self._note(keys, True)

    def removed(self, keys: Iterable[bytes]) -> None:
        """They are not in the cache any more."""
        self._note(keys, False)

    def cleared(self) -> None:
        """Nothing is in the cache any more: whatever was not known before is known now."""
        self._changes.clear()
        self._cleared, self._lost = True, False

    def take(self, held: Callable[[], tuple[bytes, ...]], whole: bool) -> CacheChanges:
        """The changes since the last ``take``, with all keys when ``whole``. held: what the cache holds now."""
        lost, cleared = self._lost, self._cleared
        removed = tuple(key for key, there in self._changes.items() if not there)
        stored = tuple(key for key, there in self._changes.items() if there)
        self._changes.clear()
        self._cleared = self._lost = False
        return CacheChanges(cleared, removed, stored, held() if whole or lost else None, lost)

    def _note(self, keys: Iterable[bytes], there: bool) -> None:
        if self._lost:
            return
        for key in keys:
            self._changes[key] = there
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self._cleared, self._lost = False, True
