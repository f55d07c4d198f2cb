"""Admission to a run: of everybody, of whoever did some work, or of those whom its owner has invited.

The door, the DHT and the records all ask here. What a peer has shown is remembered while it holds.

A token lets in so many members: peers that show a signed record with it. A peer that shows the credential alone is a
visitor, as a tool is, or a node that has not joined yet. Visitors do not use the token up; a few of each token may be
here at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from protocol.access.peer_limits import PeerTable
from protocol.access.revocations import Revocations, mark_of
from protocol.access.tokens import Credential, Invitation
from protocol.errors import RecordError
from protocol.ground import PeerId
from protocol.records.identity import public_key_of
from protocol.run.signed_manifest import SignedManifest
from protocol.windows import window

MOST_SHOWN = 1 << 14  # peers whose credentials are kept
# visitors of a token at a time, where it is for fewer members: each tool that is started comes with a key of its own
LEAST_VISITORS = 8
VISIT_SECONDS = 60.0  # of silence, after which a visitor that did not take its leave gives way to another one
_CHECKED = 4_096  # credentials whose signatures were checked


class Admission:
    """Decides who may take part in a run, and checks the credentials that peers show.

    Mutable state: this peer's own credential, what others have shown, the members and the visitors of each token, and
    the owner's last revocations.
    """

    def __init__(self, signed: SignedManifest, me: PeerId, now: Callable[[], float]) -> None:
        """`now` is the wall clock."""
        self.run_id = signed.run_id
        self.rules = signed.manifest.access
        self.own = b""
        self.me = me
        self.sealed = b""  # the last revocations, as the owner signed them
        self.revoked = Revocations()
        self._owner = signed.public_key
        self._now = now
        self._shown = PeerTable[Credential](MOST_SHOWN)
        self._users: dict[bytes, set[PeerId]] = {}  # members of each token, by its serial
        # visitors of each token, by its serial, with the wall clock when each was seen last; the latest at the end
        self._visitors: dict[bytes, dict[PeerId, float]] = {}
        self._read = lru_cache(_CHECKED)(
            lambda raw, peer: Credential.read(raw, self.run_id, self._owner, peer)
        )

    @window
    def __repr__(self) -> str:
        return f"Shown: {len(self._shown)} | Revoked: {len(self.revoked.entries)}"

    # --- asking

    def check(self, peer: PeerId, credential: bytes, *, takes_part: bool = False) -> None:
        """Remember what `peer` shows. Raises `RecordError` when it lets nobody in; all is then as it was.

        A peer that `takes_part`, as it has shown a record, is one of those that its token is for from then on. Any
        other one is a visitor.
        """
        if self._is_revoked(peer):
            raise RecordError("the run's owner has shut this peer out")
        if peer not in self.rules.peers:
            shown: Credential = self._read(credential, peer)
            self._check_current(shown)
            if takes_part:
                self._count_use(shown.invitation, peer)
            elif peer != self.me:
                self._receive(shown.invitation, peer)
            self._shown[peer] = shown

    def admits(self, peer: PeerId, credential: bytes, *, takes_part: bool = False) -> bool:
        """Return whether `check` lets the peer in."""
        try:
            self.check(peer, credential, takes_part=takes_part)
        except RecordError:
            return False
        return True

    def could_join(self, peer: PeerId, credential: bytes) -> bool:
        """Return whether `peer` would be let in with a record; nothing is remembered."""
        if peer in self.rules.peers:
            return not self._is_revoked(peer)
        try:
            shown: Credential = self._read(credential, peer)
            self._check_current(shown)
        except RecordError:
            return False
        users = self._users.get(shown.invitation.serial, set())
        return not self._is_revoked(peer) and (peer in users or len(users) < shown.invitation.uses)

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer may be here, by what it has shown before.

        A visitor has been seen with that.
        """
        if not self._may_be_here(peer):
            return False
        shown = self._shown.get(peer)
        if shown is not None and peer in (here := self._visitors.get(shown.invitation.serial, {})):
            _put_last(here, peer, self._now())
        return True

    def note_gone(self, peer: PeerId) -> None:
        """Let a visitor give way to the next one: it has ended what it had open here. It may come back."""
        shown = self._shown.get(peer)
        serial = shown.invitation.serial if shown is not None else b""
        if peer in (here := self._visitors.get(serial, {})):
            del here[peer]
            self._visitors[serial] = {peer: -math.inf, **here}

    def _may_be_here(self, peer: PeerId) -> bool:
        if self._is_revoked(peer):
            return False
        if peer == self.me or peer in self.rules.peers:
            return True
        shown = self._shown.get(peer)
        return shown is not None and self._is_current(shown)

    def known(self) -> list[PeerId]:
        """The peers that have shown a credential that holds, without this one."""
        return [peer for peer in self._shown if peer != self.me and self._may_be_here(peer)]

    @property
    def own_ends(self) -> float:
        """The time at which this peer's own credential is over, once it has been checked; wall clock."""
        shown = self._shown.get(self.me)
        return shown.invitation.ends if shown is not None else self._now()

    def shut_out(self) -> list[PeerId]:
        """Forget and return the peers that have shown what does not hold any more."""
        gone = [
            peer
            for peer, shown in self._shown.items()
            if not self._is_current(shown) or self._is_revoked(peer)
        ]
        for peer in gone:
            self._visitors.get(self._shown.pop(peer).invitation.serial, {}).pop(peer, None)
        return gone

    # --- revocations

    def adopt(self, sealed: bytes) -> bool:
        """Take the owner's list of revocations if it is a later one. Raises `RecordError` for anything else."""
        if sealed == self.sealed:
            return False
        revoked = Revocations.read(sealed, self.run_id, self._owner)
        if revoked.issued <= self.revoked.issued:
            return False
        self.revoked, self.sealed = revoked, sealed
        return True

    def _is_revoked(self, peer: PeerId) -> bool:
        return bool(self.revoked.entries) and mark_of(public_key_of(peer)) in self.revoked.entries

    # --- what a credential must be beside well signed

    def _check_current(self, shown: Credential) -> None:
        invitation = shown.invitation
        if not self._now() < invitation.ends:
            raise RecordError("the invitation has expired")
        issuer = {mark_of(invitation.delegation.key)} if invitation.delegation else set[bytes]()
        if self.revoked.entries & {invitation.serial, *issuer}:
            raise RecordError("the run's owner has revoked the invitation")

    def _is_current(self, shown: Credential) -> bool:
        try:
            self._check_current(shown)
        except RecordError:
            return False
        return True

    def _count_use(self, invitation: Invitation, peer: PeerId) -> None:
        """Count a member's use of a token: the first ones that came here with it are those that it is for."""
        users = self._users.setdefault(invitation.serial, set())
        if peer not in users and len(users) >= invitation.uses:
            raise RecordError("as many others as the invitation is for have used it")
        users.add(peer)
        self._visitors.get(invitation.serial, {}).pop(peer, None)

    def _receive(self, invitation: Invitation, peer: PeerId) -> None:
        """Give a visitor of a token one of the places that all of them share, or that of one that is gone."""
        if peer in self._users.get(invitation.serial, ()):
            return
        here, now = self._visitors.setdefault(invitation.serial, {}), self._now()
        if peer not in here and len(here) >= max(LEAST_VISITORS, invitation.uses):
            longest_ago, seen = next(iter(here.items()))
            if 0.0 <= now - seen < VISIT_SECONDS:  # the clock may have been set back
                raise RecordError(
                    "as many visitors as the invitation lets in at a time have come with it within the last minute"
                )
            del here[longest_ago]
            self._shown.pop(longest_ago, None)
        _put_last(here, peer, now)


def _put_last(seen: dict[PeerId, float], peer: PeerId, now: float) -> None:
    seen.pop(peer, None)
    seen[peer] = now
