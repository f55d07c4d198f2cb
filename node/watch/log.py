"""The log that a volunteer reads: short lines with the time, warnings marked, nothing of the libraries below."""

import logging
import sys
from pathlib import Path


def set_up_logging(verbose: bool, file: Path | None = None) -> None:
    """Sentences to standard error and, with `file`, also there."""
    level = logging.DEBUG if verbose else logging.INFO
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(_LogFile(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for name in ("noloco", "node", "protocol", "bootstrap"):
        logging.getLogger(name).setLevel(level)
    if not verbose:  # what of it concerns a volunteer, this project says in its own words
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)


class _LogFile(logging.FileHandler):
    """What does not go into a file on a full disk is still on the terminal, without a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Plain(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if record.levelno < logging.WARNING else line.replace("  ", "  ! ", 1)
