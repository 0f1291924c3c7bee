"""Ends a stream of text at the first stop string, however the stream was cut into pieces."""

from __future__ import annotations


class StopFilter:
    """Passes text through, holding back what may be the beginning of a stop string.

    The stream ends at the earliest character that completes a stop string; where several are completed by the same
    character, the longest counts. Text before the match comes out, the match and what follows do not. At most one
    character less than the longest stop string is ever held.

    One Knuth-Morris-Pratt automaton (1977) per stop string: the cost of a character does not depend on what is held.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self.stop_string: str | None = None  # the one that matched
        self._stops = stops
        self._fallbacks = [_fallback_table(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that end the text so far
        self._held = ""

    def push(self, text: str) -> str:
        """The text that has become certain with ``text``. After a match: nothing."""
        if not self._stops:
            return text
        if self.stop_string is not None:
            return ""
        start = len(self._held)
        self._held += text
        for i in range(start, len(self._held)):
            if self._advance(self._held[i]):
                stop = max((s for s, n in zip(self._stops, self._matched, strict=True) if n == len(s)), key=len)
                certain, self._held, self.stop_string = self._held[: i + 1 - len(stop)], "", stop
                return certain
        cut = len(self._held) - max(self._matched)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """The text still held: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> bool:
        """Move every automaton by one character; True when a stop string is complete."""
        complete = False
        for i, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            n = self._matched[i]
            while n and stop[n] != character:
                n = fallback[n - 1]
            n += stop[n] == character
            self._matched[i] = n
            complete |= n == len(stop)
        return complete


def _fallback_table(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper suffix that is also a prefix of it."""
    table, n = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = table[n - 1]
        n += stop[i] == stop[n]
        table[i] = n
    return table
