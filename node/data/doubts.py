"""What is read and yet doubted: rows that are not UTF-8, and texts that are markup."""

from __future__ import annotations

import logging
from pathlib import Path

from node.data.contents import start_of
from node.data.conversion import rows_not_utf8
from node.data.rows import has_columns_in, has_other_bytes, mended

logger = logging.getLogger(__name__)

_FEW = 0.05  # of rows that are not UTF-8: damage, where more would be another encoding
_LOOKED_AT = (1_000, 100_000)  # rows of a file, after which it may be refused before all of it was read


class Doubts:
    """The doubts about all that is read at once, so that one line reports each kind of them.

    Mutable: how many rows are not UTF-8, and where the first is; how many rows of the present file were read, are not
    UTF-8, and are UTF-8 beyond ASCII; how many texts are markup, and which is the first.
    """

    def __init__(self) -> None:
        self._damaged, self._first_damaged = 0, ""
        self._rows = self._not_utf8 = self._utf8 = 0
        self._marked_up, self._first_marked_up = 0, ""

    def next_file(self) -> None:
        """Begin to count the rows of another file."""
        self._rows = self._not_utf8 = self._utf8 = 0

    def mended(self, text: str, place: Path, number: int) -> bytes:
        """The row's UTF-8, with U+FFFD for what is not UTF-8."""
        self._rows += 1
        try:
            raw = text.encode()
            self._utf8 += not raw.isascii()
            return raw
        except UnicodeEncodeError:
            self._not_utf8 += has_other_bytes(text)
            self._first_damaged = self._first_damaged or f"{place}, row {number}"
            self._damaged += 1
            return mended(text).encode()

    def require_utf8(self, place: Path, *, is_over: bool) -> None:
        """Check that the rows are not of another encoding altogether, where enough of them are known.

        To be called after each row: it looks after exactly 1,000 and 100,000, and at the end. Raises `DataError`:
        what is replaced in a few damaged rows would be all that their letters are beyond ASCII.
        """
        if self._rows not in _LOOKED_AT and not is_over:
            return
        if self._not_utf8 > max(self._utf8, _FEW * self._rows):
            has_columns = place.is_dir() or has_columns_in(place)
            start = b"" if place.is_dir() else start_of(place)
            raise rows_not_utf8(place, self._not_utf8, self._rows, start, has_columns=has_columns)

    def marked_up(self, place: Path, what: str) -> None:
        """Count a text that is markup, such as "a web page (HTML)"."""
        self._first_marked_up = self._first_marked_up or f"{place} is {what}"
        self._marked_up += 1

    def warn(self) -> None:
        """Log a warning of each kind of doubt that there was."""
        if self._damaged:
            logger.warning(
                "Rows that are not UTF-8: %s; the first is %s. The bytes that are none were replaced by U+FFFD.",
                f"{self._damaged:,}",
                self._first_damaged,
            )
        if self._marked_up:
            logger.warning(
                "Texts that are trained on with their markup: %s; %s. Where that is not meant, make plain text of "
                "them first: pandoc -f html -t plain.",
                f"{self._marked_up:,}",
                self._first_marked_up,
            )
