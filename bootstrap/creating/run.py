"""Founding a run: its key, its signed manifest, and the seed peer at whose addresses newcomers find it.

The seed peer greets newcomers, gives them the run's tokenizer and keeps DHT records; it trains nothing.
`noloco-bootstrap` becomes its process until Ctrl-C. Members keep the DHT among themselves, so the run goes on when it
dies, and any member can be joined through.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootstrap.creating.choosing import HASHES_NAME, kept_hashes, kept_tokenizer
from bootstrap.creating.invitation import (
    ADDRESSES,
    NEAREST_LAST,
    RUN_DIRECTORY,
    in_a_line,
    in_words,
    keep_addresses,
    reach_of,
    show_code,
)
from bootstrap.creating.newcomers import tell_newcomers
from bootstrap.creating.passing import bound_in_words, tell_passed_on
from bootstrap.creating.staying import addresses_to_join, join_members, stay_with_members
from bootstrap.creating.visit_token import RUN_KEY as RUN_KEY
from bootstrap.creating.visit_token import issued_token, kept_visit_token
from bootstrap.creating.words_of_seed import INVITATION, OVER, WordAnswers, invite_by_words, words_in_force
from bootstrap.display import OTHER_ADDRESS_FILE, write_whole
from node.data.opening import LOCAL
from node.machine.processes import on_interrupt
from node.membership.entry import guard
from node.membership.hearsay import serve_records
from node.membership.joining import payload_limits, serve_greeting
from node.membership.past import Past, serve_past
from node.membership.revoking import Revoking
from node.membership.tokenizer_peers import serve_tokenizer
from node.membership.view import View
from node.membership.ways_in import serve_ways
from node.model.stage import described_parameters
from node.process.dashboard_process import dashboard_beside, own_addresses
from node.service.node_resources import attempt
from node.state.copies import CopyService
from node.state.copy_keeper import MOST_BYTES, CopyKeeper, copies_in, nbytes_of_copies
from node.storage.state_directory import StateDirectory
from node.watch.health import Report, health_served, report_of
from node.watch.words import print_wrapped
from protocol.access.admission import Admission
from protocol.access.revocations import Revocations
from protocol.access.tokens import Credential, Token
from protocol.errors import ManifestError, RecordError, StateError, TokenError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest, load_preset
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from protocol.windows import amount

logger = logging.getLogger(__name__)

MANIFEST = "manifest.noloco"
SEED_KEY = "seed.key"
SEED_CREDENTIAL = (
    "seed.credential"  # of a private run: so that the run's key need not stay with the seed peer
)
REVOKED = "revoked.noloco"
WRITTEN = {
    ADDRESSES,
    INVITATION,
    OVER,
    HASHES_NAME,
}  # beside the keys, by a seed peer and by those who invite
SEED_YEARS = 20
INVITED_SECONDS = 30 * 86_400.0  # of a token that is given by words, as `noloco invite` has it


@dataclass(frozen=True)
class Founded:
    signed: SignedManifest
    seed_key: Path
    peer_id: PeerId  # of the seed peer
    is_new: bool
    tokenizer: bytes | None = None  # the run's tokenizer.json
    credential: bytes = b""  # of the seed peer of a private run
    text: str = ""  # the founder's, as of --data, for the line that serves it
    hashes: bytes = b""  # of the tokenizer's pieces, signed


def found(directory: Path, manifest: Manifest | None, tokenizer: bytes | None = None) -> Founded:
    """Make the run's keys and sign its manifest, or take up the run that `directory` holds already.

    A manifest is immutable: raises `StateError` when the directory holds a run with another one. `tokenizer` is the
    file that the manifest names; it is kept beside the keys.
    """
    signed_path, seed_key = directory / MANIFEST, directory / SEED_KEY
    is_new = not signed_path.exists()
    if is_new:
        key = Identity.load_or_create(directory / RUN_KEY)
        signed = SignedManifest.sign(manifest or load_preset("tiny"), key)
    else:
        signed = signed_in(directory)
        if manifest is not None and signed.manifest != manifest:
            raise StateError(
                f"{directory} holds run {signed.run_id} with another manifest, and manifests never change. "
                "Give a new run a directory of its own with --state-dir."
            )
    kept = kept_tokenizer(directory, signed.manifest, tokenizer, is_new=is_new)
    hashes = kept_hashes(directory, signed, kept)
    seed = Identity.load_or_create(seed_key)
    shown = _seed_credential(directory, signed, seed) if signed.manifest.access.private else b""
    kept_visit_token(directory, signed)  # while the run's key is there
    revocations_in(directory, signed)
    if is_new:  # at last: it makes the run whole
        write_whole(signed_path, signed.to_bytes(), "Choose another --state-dir.")
    return Founded(signed, seed_key, seed.peer_id, is_new, kept, shown, hashes=hashes)


def signed_in(directory: Path) -> SignedManifest:
    """The run's manifest as its owner kept it. Raises `StateError`, also when it is damaged."""
    path = directory / MANIFEST
    try:
        return SignedManifest.from_bytes(path.read_bytes())
    except OSError as error:
        raise StateError(
            f"Cannot read {path} ({error.strerror}). Name the run's directory with --state-dir."
        ) from None
    except ManifestError as damage:
        raise StateError(
            f"{path} cannot be used: {str(damage).split('. ')[0].rstrip('.')}. Restore it from a copy, or from the "
            "state directory of any member, where it has the same name. If nobody has joined the run yet, delete it: "
            "the run is founded anew with the same keys."
        ) from None


def revocations_in(directory: Path, signed: SignedManifest) -> Revocations:
    """The list of those whom the owner has shut out so far. Raises `StateError` when it is damaged."""
    place = directory / REVOKED
    if not place.exists():
        return Revocations()
    try:
        return Revocations.read(_read(place), signed.run_id, signed.public_key)
    except RecordError as damage:
        raise StateError(
            f"{place} cannot be used ({damage}). Restore it from a copy, or from the state directory of any member, "
            "where it has the same name."
        ) from None


def _seed_credential(directory: Path, signed: SignedManifest, seed: Identity) -> bytes:
    """The credential kept beside the keys; made, or made again if damaged, while the run's key is there, too.

    Raises `StateError`, `TokenError`.
    """
    place = directory / SEED_CREDENTIAL
    if place.exists():
        kept = _read(place)
        try:
            Credential.read(kept, signed.run_id, signed.public_key, seed.peer_id)
            return kept
        except RecordError as damage:
            logger.warning("%s cannot be used (%s).", place, damage)
    if not (directory / RUN_KEY).exists():
        raise TokenError(
            f"The run is private, and {directory} has neither a {SEED_CREDENTIAL} of its seed peer nor {RUN_KEY}. "
            "Copy one of them there."
        )
    expires = time.time() + SEED_YEARS * 365.25 * 86_400
    token = Token.issue(signed.run_id, Identity.load(directory / RUN_KEY), None, 1, expires)
    shown = token.credential(seed.peer_id)
    write_whole(place, shown, "Choose another --state-dir.")
    return shown


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StateError(f"Cannot read {path} ({error.strerror}). Check its permissions.") from None


class SeedPeer:
    """A peer that keeps DHT records and greets; what is in flight belongs to its supervisor."""

    def __init__(
        self,
        transport: Transport,
        signed: SignedManifest,
        tokenizer: bytes | None = None,
        credential: bytes = b"",
        kept: Callable[[bytes], bytes] = lambda sealed: b"",
        directory: StateDirectory | None = None,
        hashes: bytes = b"",
    ) -> None:
        """`tokenizer` is the run's tokenizer.json, unless bytes are its tokens, and `hashes` the sealed ones of its
        pieces; `credential` lets this peer into a private run; `kept` is that of `Revoking`. In the `directory`, if
        there is one, it remembers who had which stage.
        """
        self.credential, self._kept = credential, kept
        self.transport = transport
        self.signed = signed
        self._supervisor = Supervisor()
        transport.supervise(self._supervisor.group())
        self._telling = self._supervisor.group()
        self.rpc = Rpc(transport, supervisor=self._supervisor.group())
        self.rpc.limit(payload_limits(signed.manifest))
        self._tokenizer, self._hashes = tokenizer, hashes
        self.view = View()  # of the members, for those who ask
        manifest = signed.manifest
        self.past = Past(signed.run_id, manifest.most_steps, manifest.limits.record_lifetime, transport.now)
        self._directory = directory

    async def start(self) -> None:
        """Listen and greet. Raises `ResourceError` when the port is taken."""
        await self.transport.start()
        admission = None
        if self.signed.manifest.access.private:
            admission = Admission(self.signed, self.transport.peer_id, self.transport.now)
            admission.own = self.credential
            await self._guard(admission)
        revoked = (lambda: admission.sealed) if admission is not None else (lambda: b"")
        serve_greeting(self.rpc, self.transport, self.signed, is_seed=True, revoked=revoked)
        serve_tokenizer(self.rpc, lambda: self._tokenizer, lambda: self._hashes)
        serve_records(self.rpc, self.signed, self.view, admission)
        if self._directory is not None:
            self.past.take_up(self._directory.past())
            WordAnswers(self.transport.peer_id, self._directory.path, self.transport.now).serve(self.rpc)
        self.view.noted = self.past.note
        serve_past(self.rpc, self.past)
        serve_ways(self.rpc)
        await self.rpc.start()

    async def _guard(self, admission: Admission) -> None:
        await guard(self.rpc, admission)
        revoking = Revoking(self.rpc, admission, admission.known, random.Random(), kept=self._kept)
        self._supervisor.keep(
            "looking for revocations",
            lambda: revoking.run(logger.warning),
            "Who is revoked learns so from others alone.",
        )

    def tell_newcomers(self) -> None:
        """Start logging for the founder who joins, and keeping which member had which stage."""
        self._telling.keep(
            "watching who joins",
            lambda: tell_newcomers(self.rpc, self.signed, self.view, self.save_past),
            "The founder does not hear who joins.",
        )

    def tell_passed_on(self, rate: float) -> None:
        """Start logging what is passed on, within so many bytes per second."""
        self._telling.keep(
            "telling what is passed on",
            lambda: tell_passed_on(self.transport, rate),
            "The founder does not hear what this peer passes on.",
        )

    async def join(self, addresses: Sequence[str]) -> None:
        """Join the members of a run that goes on. Raises `JoinError` if no member of this run answers there."""
        await join_members(self.rpc, self.signed.run_id, addresses)

    def stay_with_members(self) -> None:
        """Begin to remember members' addresses in the directory, and to dial them when nobody is connected."""
        if self._directory is not None:
            directory = self._directory
            self._telling.keep(
                "staying with the members",
                lambda: stay_with_members(self.rpc, directory),
                "Started again, this seed peer does not find the run's members by itself.",
            )

    async def save_past(self) -> None:
        """Write down who served what, if that has changed. Raises `StateError`."""
        if self._directory is not None and self.past.has_changed:
            await asyncio.to_thread(self._directory.save_past, self.past.to_bytes())

    def keep_copies(self, directory: StateDirectory) -> None:
        """Begin to keep a copy of each stage there, and to offer them to newcomers."""
        keeper = CopyKeeper(self.rpc, self.signed, directory, random.Random())
        CopyService(self.rpc, self.signed.run_id, [directory]).serve()
        self._telling.keep("keeping copies of all stages", keeper.run, "The stages are copied nowhere else.")

    def health(self) -> Report:
        """The answer to a health check on this machine: see `node.watch.health`."""
        return report_of("seed", self._supervisor, self.transport)

    async def close(self) -> None:
        await self._telling.close()
        await attempt(self.save_past, "writing down who served what")
        await self.rpc.close()
        await self.transport.close()
        await self._supervisor.close()


async def keep_seed_peer(
    founded: Founded,
    config: Libp2pConfig,
    address_file: Path | None,
    dashboard: str = "",
    keep: bool | None = None,
    join: Sequence[str] = (),
    passed_on: float = 0.0,
) -> None:
    """Run the seed peer until it is told to leave, with the `dashboard` at HOST:PORT, if any.

    It keeps copies of all stages if told to `keep` them, and by default where they are small. `join` are addresses
    of members, for a run that goes on and whose members do not know this peer. Between members that cannot dial each
    other it passes on so many bytes per second.

    Raises `ResourceError` when a port is taken, and `JoinError` when none of the run answers at `join`.
    """
    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    transport, revoked = Libp2pTransport(founded.seed_key, config), founded.seed_key.with_name(REVOKED)
    directory = founded.seed_key.parent
    seed = SeedPeer(
        transport,
        founded.signed,
        founded.tokenizer,
        founded.credential,
        kept_in(revoked),
        StateDirectory(directory),
        founded.hashes,
    )
    try:
        await seed.start()
        seed.transport.pass_on(passed_on)
        if join:
            await seed.join(join)
        elif not founded.is_new and not StateDirectory(directory).peer_book():
            logger.warning(
                "This seed peer knows none of the run's members. If some train already, start it again with --join "
                "ADDRESS of one: newcomers would not find them through it."
            )
        seed.stay_with_members()
        addresses = await addresses_to_join(seed.transport) if join else seed.transport.addresses()
        keep_addresses(founded.seed_key.parent, addresses)
        introduce(founded, addresses, address_file)
        seed.tell_newcomers()
        print_wrapped(bound_in_words(passed_on))
        seed.tell_passed_on(passed_on)
        if keeps_copies(founded.signed, keep):
            seed.keep_copies(copies_in(directory))
        page = dashboard_beside(
            dashboard,
            lambda: own_addresses(seed.transport, config.port, config.host),
            token=lambda: kept_visit_token(directory, founded.signed),
        )
        async with health_served(founded.seed_key.parent, seed.health), page:
            await leaving.wait()
        logger.info("The seed peer leaves. The run goes on: newcomers may join through any member.")
        if passed := transport.passed_on:
            logger.info("It has passed on %s between members that cannot dial each other.", amount(passed))
    finally:
        await seed.close()


def _show_words(founded: Founded, addresses: Sequence[str]) -> None:
    """Print an invitation by words on a terminal, but never into a log that others may read.

    Words that the founder may have given away already stay. Without the run's key there are none to make.
    """
    directory = founded.seed_key.parent
    token = issued_token(directory, founded.signed, INVITED_SECONDS) if sys.stdout.isatty() else ""
    if token:
        words = words_in_force(directory, time.time()) or invite_by_words(directory, token, time.time())
        command = in_words(addresses, words)
        print_wrapped(
            f"Or, for one person and within ten minutes:\n    {command}\n"
            f"noloco invite --words --state-dir {directory} makes other words."
        )


def keeps_copies(signed: SignedManifest, keep: bool | None) -> bool:
    """Return whether to keep copies of all stages, and say so: as told, else where they take little."""
    nbytes = nbytes_of_copies(signed)
    keeps = nbytes <= MOST_BYTES if keep is None else keep
    taken = f"{nbytes / 1e9:.2g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2g} MB"
    if keeps:
        print_wrapped(
            f"This seed peer keeps a copy of every stage's state ({taken} in all), so that the run outlives a night "
            "in which all members are off. --no-keep leaves that to the members."
        )
    else:
        print_wrapped(
            f"This seed peer keeps no copies of the stages ({taken} in all): what nobody serves is where its members "
            "saved it. --keep has it keep them."
        )
    return keeps


def kept_in(place: Path) -> Callable[[bytes], bytes]:
    """The `kept` of `Revoking`: the file that `noloco revoke` writes; others' lists do not change it."""
    return lambda _: place.read_bytes() if place.exists() else b""


def _own_line(founded: Founded, addresses: Sequence[str]) -> str:
    """Return the founder's own command to serve stage 0 with the run's text, at the address that is nearest."""
    nearest = max(addresses, key=lambda address: NEAREST_LAST.index(reach_of(address)))
    joining = shlex.join(["noloco", "join", nearest, "--data", founded.text])
    if not founded.signed.manifest.access.private:
        return joining
    directory = founded.seed_key.parent
    inviting = (
        ["noloco", "invite"]
        if directory == RUN_DIRECTORY
        else ["noloco", "invite", "--state-dir", str(directory)]
    )
    return f"NOLOCO_TOKEN=$({shlex.join(inviting)}) {joining}"


def introduce(founded: Founded, addresses: list[str], address_file: Path | None) -> None:
    """Say on the screen, and in the file, what volunteers join with, and what the founder has to know."""
    if address_file is not None:
        listed = "".join(f"{address}\n" for address in addresses)
        write_whole(address_file, listed, OTHER_ADDRESS_FILE)
    manifest = founded.signed.manifest
    doing = "Founded" if founded.is_new else "Taking up"
    print_wrapped(
        f"{doing} run '{manifest.name}', id {founded.signed.run_id}: "
        f"{manifest.stages} stages, {manifest.model.layers} layers of width {manifest.model.hidden_size}, "
        f"{described_parameters(manifest)}."
    )
    if not manifest.access.private:  # above the addresses, which it would push off a small screen
        show_code(in_a_line(addresses), sys.stdout)
    print_wrapped("Volunteers join with one of these, each in a directory of its own or with --state-dir:")
    for address in addresses:
        print(f"  from {reach_of(address)}:")
        print(f"    noloco join {address}")
    if manifest.access.private:
        print_wrapped(
            f"The run is private: noloco invite --state-dir {founded.seed_key.parent} makes tokens, and of each "
            "a line to join with."
        )
        _show_words(founded, addresses)
    if founded.text:
        print_wrapped(
            "This machine trains on your text with this line, in another terminal and the same folder:"
        )
        print(f"    {_own_line(founded, addresses)}")
    if manifest.data.source == LOCAL:
        print_wrapped("Its text is what volunteers bring: whoever serves stage 0 adds --data FILE.")
    if founded.is_new:
        print_wrapped(
            f"{founded.seed_key.with_name(RUN_KEY)} is the run's key. Who has it can sign plans for the run "
            "(noloco plan --publish); training does not need it, and it cannot be made again. Keep a copy elsewhere, "
            "and give it to nobody."
        )
    if manifest.start is not None:
        print_wrapped(
            f"The run starts from '{manifest.start.name}': give the first replica of each stage --from-checkpoint "
            "DIRECTORY, too. Later ones get the weights from it."
        )
    print_wrapped("Ctrl-C stops the seed peer; the run goes on among its members.")
