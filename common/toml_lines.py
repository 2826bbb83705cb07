"""On which line of a TOML text each key stands, which `tomllib` does not tell.

The text has been accepted by `tomllib` before, so this reads only structure: headers, dotted
keys, inline tables, arrays and strings. It decides nothing about values.
"""

import re
import tomllib
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]
"""Where a value stands: table keys, and indexes into arrays."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)


def locate(text: str) -> dict[KeyPath, int]:
    """Map each key path of a valid TOML text to the 1-based line that first names it.

    Tables and entries of arrays have paths as well; the whole file is `()` on line 1.
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    """A cursor over the text. Each method starts and leaves it at a token's edge."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {(): 1}
        self.table_counts: dict[KeyPath, int] = {}
        """Entries so far of each array of tables."""

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)
        return self.lines

    def _header(self) -> KeyPath:
        is_array = self.text.startswith("[[", self.at)
        line = self._line()
        self.at += 2 if is_array else 1
        path: KeyPath = ()
        keys = list(self._keys())
        for depth, key in enumerate(keys, start=1):
            path = self._name(path, key, line)
            if is_array and depth == len(keys):
                self.table_counts[path] = self.table_counts.get(path, 0) + 1
            if path in self.table_counts:  # A header names the last entry of an array.
                path = self._name(path, self.table_counts[path] - 1, line)
        self.at += 2 if is_array else 1
        return path

    def _name(self, table: KeyPath, key: str | int, line: int) -> KeyPath:
        path = (*table, key)
        self.lines.setdefault(path, line)
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for key in self._keys():
            path = self._name(path, key, line)
        self.at += 1  # The equals sign.
        self._skip(_SPACE)
        self._value(path)

    def _keys(self) -> Iterator[str]:
        while True:
            self._skip(_SPACE)
            yield self._key()
            self._skip(_SPACE)
            if self.text[self.at] != ".":
                return
            self.at += 1

    def _key(self) -> str:
        if self.text[self.at] not in "\"'":
            return self._skip(_BARE_KEY)
        return tomllib.loads(f"key = {self._skip(_STRING)}")["key"]

    def _value(self, path: KeyPath) -> None:
        match self.text[self.at]:
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._skip(_STRING)
            case _:
                self._skip(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        while self._next_inside("]"):
            self._value(self._name(path, index, self._line()))
            index += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while self._next_inside("}"):
            self._pair(path)

    def _next_inside(self, closing: str) -> bool:
        """Move to the next element and return True, or past the closing bracket."""
        self._skip(_BLANK)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_BLANK)
        if self.text[self.at] != closing:
            return True
        self.at += 1
        return False

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"TOML that tomllib accepts, at character {self.at}"
        self.at = match.end()
        return match.group()

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1
