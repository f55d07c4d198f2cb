"""An export's weights: whose they are, fetched in verified pieces, and kept on disk so that the export can resume.

They come from one replica of each stage, or from all of a stage that are at one round; then the file has their mean.
Those of a stage that nobody serves come from a copy on a peer's disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from bootstrap.inspect.kept_copies import KeptCopy
from bootstrap.inspect.observer import Observer
from node.model.fragment import PIECE_PARAMETERS
from node.state.transfer import INDEX_DEADLINE, PIECES_IN_FLIGHT, fetch_slow_piece
from node.state.witnesses import MOST_WITNESSES, DonatedPiece, Unlike, compared
from protocol.errors import JoinError, NolocoError, StateError
from protocol.ground import PeerId
from protocol.messages.state import GetStateIndex
from protocol.supervision import all_of
from protocol.windows import short


@dataclass(frozen=True)
class Donor:
    """A replica that offers its slow weights; `is_finished` when it does not train any more."""

    peer: PeerId
    step: int
    round: int
    is_finished: bool = False
    name: str = ""  # for people

    def __str__(self) -> str:
        return self.name or short(self.peer)


@dataclass(frozen=True)
class Source:
    """The source of one stage's weights; of several donors the mean. Sorted by peer id."""

    stage: int
    parameters: int
    donors: tuple[Donor, ...]
    holders: tuple[PeerId, ...] = ()  # all that have them, to compare a donor's with
    copy: KeptCopy | None = None  # that the only donor keeps of a stage that nobody serves

    @classmethod
    def of_copy(cls, stage: int, kept: KeptCopy) -> Source:
        """The source of a stage that nobody serves."""
        copy = kept.copy
        return cls(
            stage, copy.parameters, (Donor(kept.peer, copy.step, copy.round, name=kept.name),), copy=kept
        )

    @property
    def key(self) -> list[list[str | int]]:
        """The key that two fetches must have in common to be of the same weights."""
        if self.copy is not None:
            copy = self.copy.copy
            return [[f"{self.copy.peer} at step {copy.step} of {copy.beginning}, {copy.saved}", copy.round]]
        return [[str(donor.peer), donor.round] for donor in self.donors]

    def __str__(self) -> str:
        if self.copy is not None:
            return f"{self.copy}: nobody serves it"
        if len(self.donors) == 1:
            return f"{self.donors[0]} at round {self.donors[0].round}"
        rounds = sorted({donor.round for donor in self.donors})
        at = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}, the end"
        return f"{len(self.donors)} replicas at {at}"


def choose(donors: Sequence[Donor], mean: bool, earlier: Sequence[Sequence[str | int]] = ()) -> list[Donor]:
    """Choose donors; those of an earlier, incomplete export where they are still at the same round.

    For a mean the largest group at one round, of equal ones the latest; replicas that have finished are one group.
    """
    known = {(str(donor.peer), donor.round): donor for donor in donors}
    again = [known.get((str(peer), int(round_))) for peer, round_ in earlier]
    kept = [donor for donor in again if donor is not None]
    groups: dict[tuple[bool, int], list[Donor]] = {}
    for donor in donors:
        groups.setdefault((donor.is_finished, -1 if donor.is_finished else donor.round), []).append(donor)
    if not mean:
        return kept if kept and len(kept) == len(again) == 1 else list(donors[:1])
    best = max(groups.items(), key=lambda item: (len(item[1]), item[0]))[1]
    return kept if len(kept) == len(again) >= len(best) else best


async def donors_of(observer: Observer, stage: int, parameters: int, peers: Sequence[PeerId]) -> list[Donor]:
    """The donors among `peers`: those that answer and hold as many parameters as the manifest says, by peer id.

    Raises `JoinError` when nobody does, with what each of those asked failed with.
    """
    stages = observer.manifest.stages
    answers = await all_of(*(_index(observer, stage, parameters, peer) for peer in sorted(peers)))
    found = [answer for answer in answers if not isinstance(answer, str)]
    if not found and answers:
        raise JoinError(
            "\n  ".join([f"No replica of stage {stage} of {stages} gives its weights:", *map(str, answers)])
            + "\nTry again; started again with the same --out an export goes on where it stopped."
        )
    if not found:
        raise observer.nobody_at(stage)
    return found


async def _index(observer: Observer, stage: int, parameters: int, peer: PeerId) -> Donor | str:
    """The donor, or a sentence that says why the peer is not one."""
    name = observer.called([peer])
    try:
        index, _ = await observer.rpc.call(peer, GetStateIndex(), deadline=INDEX_DEADLINE)
    except NolocoError as failure:
        return f"{name}: {failure}"
    if index.stage != stage:
        return f"{name}: it moved to stage {index.stage}"
    if index.parameters != parameters:
        return f"{name}: it has {index.parameters} parameters where the manifest says {parameters}"
    return Donor(peer, index.step, index.round, observer.view.has_finished(peer), name)


class RoundEnded(Exception):
    """A donor's weights have changed since the fetch began."""

    def __init__(self, donor: Donor, round_: int) -> None:
        super().__init__(f"{donor} went on from round {donor.round} to {round_}")
        self.peer = donor.peer


class GaveNothing(JoinError):
    """A donor did not give a piece of its weights, however often it was asked."""

    def __init__(self, donor: Donor, failure: JoinError) -> None:
        super().__init__(str(failure))
        self.peer = donor.peer


class Distrusted(Exception):
    """A donor's weights are unlike those of the stage's other replicas."""

    def __init__(self, donor: Donor, why: Unlike) -> None:
        super().__init__(f"{donor} gives other weights than the other replicas: {why}")
        self.peer = donor.peer


async def fetch_stage(
    observer: Observer, file: StageFile, progress: Callable[[int, int], None], rng: random.Random
) -> None:
    """Fetch every missing piece of the file; `progress(pieces there, of how many)`.

    Memory: a few pieces, however large the stage. Raises `GaveNothing` when a donor goes away or sends what its
    hash does not fit, `JoinError` when nobody gives a piece of a copy, `RoundEnded` when a donor goes on, and
    `Distrusted` when its weights are unlike those of others, where two more replicas tell; what was fetched until
    then is kept in the file. Peers must not be able to guess `rng`.
    """
    slots = asyncio.Semaphore(PIECES_IN_FLIGHT)
    progress(len(file.present), file.pieces)

    async def fetch(piece: int) -> None:
        async with slots:
            file.store(piece, await _mean(observer, file, piece, rng))
            progress(len(file.present), file.pieces)

    await all_of(*(fetch(piece) for piece in file.missing))


async def _mean(observer: Observer, file: StageFile, piece: int, rng: random.Random) -> torch.Tensor:
    """The piece's float32 mean over the donors, added up in float64; a single donor's piece stays bit for bit."""
    source = file.source
    if source.copy is not None:
        return await source.copy.slow_piece(observer, piece)
    total: torch.Tensor | None = None
    for donor in source.donors:
        try:
            state, phi = await fetch_slow_piece(
                observer.rpc, source.stage, source.parameters, piece, donor.peer
            )
        except JoinError as failure:
            raise GaveNothing(donor, failure) from None
        if state.round != donor.round:
            raise RoundEnded(donor, state.round)
        others = [peer for peer in source.holders if peer != donor.peer]
        asked = rng.sample(others, min(MOST_WITNESSES, len(others)))
        claim = DonatedPiece(source.stage, source.parameters, piece, [phi], state.step, state.round)
        try:
            await compared(observer.rpc, claim, asked, observer.manifest.inner, rng)
        except Unlike as why:
            raise Distrusted(donor, why) from None
        if len(source.donors) == 1:
            return phi
        total = phi.double() if total is None else total.add_(phi)
    assert total is not None
    return total.div_(len(source.donors)).float()


PIECE_BYTES = PIECE_PARAMETERS * 4


class StageFile:
    """One stage's weights on disk as they are fetched, so that an export can go on after an interruption.

    Mutable state: the file, its journal, and which pieces are there.
    """

    def __init__(self, directory: Path, run_id: str, source: Source) -> None:
        """Go on where an earlier fetch of the same weights stopped, else start again. Raises `OSError`."""
        self.path, self._journal = _paths(directory, source.stage)
        self.source = source
        self.pieces = -(-source.parameters // PIECE_PARAMETERS)
        self._header = {"run": run_id, "parameters": source.parameters, "donors": source.key}
        self.present = self._kept()
        if not self.present:
            self._begin()

    def _kept(self) -> set[int]:
        """The complete pieces of an earlier fetch."""
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

    def __getitem__(self, span: slice) -> NDArray[np.float32]:
        """The weights from `span.start` to `span.stop`. Raises `OSError`, and `StateError` where the file was cut.

        They are read, never mapped: a file that is cut while it is mapped ends the process.
        """
        count = span.stop - span.start
        with self.path.open("rb") as file:
            file.seek(4 * span.start)
            found = np.fromfile(file, np.float32, count)
        if len(found) < count:
            raise StateError(
                f"{self.path} was cut while the checkpoint was written. Check the disk, and start again with the "
                "same --out: what is missing is fetched again."
            )
        return found


def earlier_donors(directory: Path, run_id: str, stage: int) -> Sequence[Sequence[str | int]]:
    """The donors of an earlier, incomplete export of this run into `directory`; none where there was none."""
    header, _ = _read_journal(_paths(directory, stage)[1])
    donors = header.get("donors", []) if header.get("run") == run_id else []
    return donors if isinstance(donors, list) else []


def _paths(directory: Path, stage: int) -> tuple[Path, Path]:
    return directory / f"stage-{stage:04d}.f32", directory / f"stage-{stage:04d}.jsonl"


def _read_journal(path: Path) -> tuple[dict[str, object], dict[int, str]]:
    """The header and the hash of each piece; a last line that was cut short is passed over."""
    header: dict[str, object] = {}
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
