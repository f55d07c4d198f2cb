"""One stage's weights on disk while they are fetched, so that an export that was cut short can go on.

A flat float32 file, and beside it a journal: whose weights these are, then a line with the SHA-256 of each piece
that is there. A piece counts only when the journal has it and its bytes still give that hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from bootstrap.export.sources import Source
from node.model.replica import PIECE_PARAMETERS

PIECE_BYTES = PIECE_PARAMETERS * 4


class StageFile:
    """Mutable state: the file, its journal, and which pieces are there."""

    def __init__(self, directory: Path, run_id: str, source: Source) -> None:
        """Go on where an earlier fetch of the same weights stopped, else begin anew. Raises `OSError`."""
        self.path, self._journal = _paths(directory, source.stage)
        self.source = source
        self.pieces = -(-source.parameters // PIECE_PARAMETERS)
        self._header = {"run": run_id, "parameters": source.parameters, "donors": source.key}
        self.present = self._kept()
        if not self.present:
            self._begin()

    def _kept(self) -> set[int]:
        """The pieces of an earlier fetch that are whole."""
        header, hashes = _read_journal(self._journal)
        if header != self._header or not self.path.exists():
            return set()
        with self.path.open("rb") as file:
            return {
                piece
                for piece, sha in hashes.items()
                if piece < self.pieces and hashlib.sha256(self._read(file, piece)).hexdigest() == sha
            }

    def _read(self, file: BinaryIO, piece: int) -> bytes:
        file.seek(piece * PIECE_BYTES)
        return file.read(min(PIECE_BYTES, self.source.parameters * 4 - piece * PIECE_BYTES))

    def _begin(self) -> None:
        self._journal.write_text(json.dumps(self._header) + "\n", encoding="utf-8")
        with self.path.open("wb") as file:
            file.truncate(self.source.parameters * 4)

    def store(self, piece: int, weights: torch.Tensor) -> None:
        """Write the float32 `weights` of a piece, then note it. Raises `OSError`."""
        data = weights.numpy().tobytes()
        with self.path.open("r+b") as file:
            file.seek(piece * PIECE_BYTES)
            file.write(data)
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps([piece, hashlib.sha256(data).hexdigest()]) + "\n")
        self.present.add(piece)

    @property
    def missing(self) -> list[int]:
        return [piece for piece in range(self.pieces) if piece not in self.present]

    def weights(self) -> NDArray[np.float32]:
        """All of them, [parameters], mapped from the file."""
        return np.memmap(self.path, np.float32, mode="c", shape=(self.source.parameters,))


def earlier_donors(directory: Path, run_id: str, stage: int) -> Sequence[Sequence[str | int]]:
    """Whose weights an earlier export into `directory` was fetching; nobody's where there was none of this run."""
    header, _ = _read_journal(_paths(directory, stage)[1])
    donors = header.get("donors", []) if header.get("run") == run_id else []
    return donors if isinstance(donors, list) else []


def _paths(directory: Path, stage: int) -> tuple[Path, Path]:
    return directory / f"stage-{stage:04d}.f32", directory / f"stage-{stage:04d}.jsonl"


def _read_journal(path: Path) -> tuple[dict[str, Any], dict[int, str]]:
    """The header and the hash of each piece; a last line that was cut short is passed over."""
    header: dict[str, Any] = {}
    hashes: dict[int, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return header, hashes
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            header = entry
        elif isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int):
            hashes[entry[0]] = str(entry[1])
    return header, hashes
