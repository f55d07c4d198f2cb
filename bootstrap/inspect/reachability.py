"""Whether others can dial this machine, and whether its clock is theirs, by what several members answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from node.machine.checkup import CheckResult, Interface
from node.machine.limits import tcp_port
from node.membership.joining import HELLO_DEADLINE
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages.peers import Hello
from protocol.records.addresses import host_of
from protocol.rpc.rpc import Rpc
from protocol.supervision import all_of
from protocol.transport.punching import MOST_SEEN

MOST_DIALLING_BACK = 8


@dataclass(frozen=True)
class Answered:
    """A member's answer: the address at which it dialled this machine, "" for none; seconds that we are ahead."""

    reached: str
    ahead: float


async def ask_members(rpc: Rpc, members: Sequence[PeerId]) -> list[Answered | None]:
    """Ask members for their time, and to dial this machine back; None for no answer within `HELLO_DEADLINE`."""
    transport = rpc.transport
    port = tcp_port(transport.addresses())

    async def ask(peer: PeerId) -> Answered | None:
        asked = transport.now()
        try:
            welcome, _ = await rpc.call(peer, Hello(port=port), deadline=HELLO_DEADLINE)
        except NolocoError:
            return None
        return Answered(welcome.reached, (asked + transport.now()) / 2 - welcome.time)

    return await all_of(*(ask(peer) for peer in members[:MOST_DIALLING_BACK]))


def clock(answers: Sequence[Answered | None], first: float, limit: float) -> CheckResult:
    """Judge the clock by how far it is ahead of members', or was of the `first`; `limit` is what the run allows."""
    ahead = [answer.ahead for answer in answers if answer is not None] or [first]
    middle = median(ahead)
    beside = f"{len(ahead)} members'" if len(ahead) > 1 else "a member's"
    told = f"{middle:+.2f} s beside {beside}; {limit:g} s are allowed."
    if abs(middle) > limit:
        return CheckResult("clock", False, f"{told} Switch on time synchronisation: timedatectl set-ntp true")
    if wrong := sum(abs(one - middle) > limit for one in ahead):
        told += f" {wrong} of them differ{'s' * (wrong == 1)} by more, which is theirs to mend."
    return CheckResult("clock", True, told)


def reachability(
    answers: Sequence[str | None],
    port: int,
    near: Interface | None = None,
    seen: Sequence[str] = (),
    networks: int = 0,
) -> CheckResult:
    """Judge the port by answers: the address at which this machine was dialled, "" for none, None for no answer.

    They are of peers of so many `networks`, some of which have `seen` this machine's connections at these addresses.
    """
    tried = [answer for answer in answers if answer is not None]
    at = sorted({answer for answer in tried if answer})
    if at:
        told = (
            f"{sum(map(bool, tried))} of {len(tried)} peers{_of(networks)} dialled this machine directly, at "
            f"{', '.join(at)}."
        )
        if not any(_is_local(address) for address in at):
            return CheckResult("port", True, told)
        return CheckResult(
            "port", None, f"{told} They are in its own network; for others: {_opened(port, near)}"
        )
    if not tried:
        return CheckResult("port", None, "Nobody tried to dial this machine back.")
    told = (
        f"None of {len(tried)} peers{_of(networks)} could dial this machine. A node here trains with those that it "
        "can dial itself, and with others through a peer that passes streams on: a seed peer does, and members with "
        f"--relay-for-others.{_met(seen, near)} For the direct way: {_opened(port, near)}"
    )
    return CheckResult("port", None, told)


def _of(networks: int) -> str:
    return f", of {networks} networks," if networks > 1 else ""


def _met(seen: Sequence[str], near: Interface | None) -> str:
    """What the router's ports tell of meeting other hidden nodes directly; nothing by fewer than two observers."""
    if len(seen) < MOST_SEEN or (near is not None and not near.is_private):
        return ""
    if len(set(seen)) == 1:
        return f" Most others behind routers it meets directly: {len(seen)} peers see it at {seen[0]}."
    return (
        " Others behind routers it does not meet directly: the router gives each destination another port "
        f"({', '.join(sorted(set(seen))[:MOST_SEEN])})."
    )


def _opened(port: int, near: Interface | None) -> str:
    if near is not None and not near.is_private:
        return (
            f"Open TCP port {port} in this machine's firewall (ufw allow {port}/tcp), and in its provider's; choose "
            "the port with --port."
        )
    to = f"{near.address}, this machine" if near is not None else "this machine"
    return (
        f"Forward TCP port {port} of the router to {to}, open it in the firewall, or name the outside address with "
        "--announce; choose the port with --port."
    )


def _is_local(address: str) -> bool:
    """Return whether an address leads to this machine within a private network alone, as a loopback one does not."""
    host = host_of(address)
    return host is not None and host.is_private and not host.is_loopback
