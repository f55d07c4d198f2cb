"""How tools come into a private run: with a token, or with what this machine has of a member or of the founder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bootstrap.creating.invitation import ADDRESSES, keep_addresses
from bootstrap.creating.visit_token import RUN_KEY, VISIT_TOKEN, kept_visit_token
from bootstrap.inspect import credentials
from bootstrap.inspect.contributors import show_contributors
from bootstrap.inspect.link_map import show_links
from bootstrap.inspect.observer import visit
from bootstrap.inspect.status import show_status
from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.placement.live_plan import look_at
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership import joining
from node.storage.state_directory import StateDirectory
from protocol.access.admission import LEAST_VISITORS
from protocol.access.revocations import Revocations
from protocol.access.tokens import Token
from protocol.errors import JoinError, TokenError
from protocol.files.keeping import replace_whole
from protocol.records.identity import Identity
from protocol.run.signed_manifest import SignedManifest
from tests.swarm.micro import FOREVER, everyone_reaches, fails_to_join, micro_swarm, run_swarm, until
from tests.swarm.test_private_runs import DAY, OWNER, everyone, private_swarm, token

TOOLS: dict[str, Callable[[list[str], str], Any]] = {
    "visit": lambda join, given: _visit(join, given),
    "status": lambda join, given: show_status(join, given, None, watch=False, is_json=False),
    "contributors": lambda join, given: show_contributors(join, given, False),
    "links": lambda join, given: show_links(join, given, None),
    "plan": lambda join, given: look_at(join, given),
}


async def _visit(join: list[str], given: str) -> None:
    async with visit(join, given) as looking:
        assert all(sighting.stats is not None for sighting in await looking.survey())


@dataclass
class Here:
    """The folder that tools are started in, and the run that they visit."""

    swarm: SimulatedSwarm
    folder: Path

    @property
    def join(self) -> list[str]:
        return self.swarm.seed_peer.transport.addresses()

    @property
    def signed(self) -> SignedManifest:
        return self.swarm.seed_peer.signed

    def as_member(self, text: str, where: str = "noloco-state") -> None:
        state = StateDirectory(self.folder / where)
        state.path.mkdir(parents=True)
        state.save_token(text)

    def as_founder(self, where: str = "noloco-run") -> Path:
        directory = self.folder / where
        directory.mkdir()
        OWNER.save(directory / RUN_KEY)
        replace_whole(directory / "manifest.noloco", self.signed.to_bytes())
        return directory


@pytest.fixture
def visiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[SimulatedSwarm], Here]:
    """Have tools visit a swarm in memory, by the clock of that."""

    def into(swarm: SimulatedSwarm) -> Here:
        def transport(key: Path, config: object) -> MemoryTransport:
            return MemoryTransport(swarm.network, Identity.load(key))

        monkeypatch.setattr(joining, "Libp2pTransport", transport)
        monkeypatch.setattr("bootstrap.creating.visit_token.time.time", swarm.network.now)
        monkeypatch.setattr(credentials, "running_here", list)
        monkeypatch.delenv("NOLOCO_STATE_DIR", raising=False)
        monkeypatch.chdir(tmp_path)
        return Here(swarm, tmp_path)

    return into


def test_every_tool_comes_into_an_open_run_and_into_a_private_one(
    visiting: Callable[[SimulatedSwarm], Here], capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.start(2)
        await everyone_reaches(swarm, 1)
        for tool in TOOLS.values():
            await tool(visiting(swarm).join, "")
        await swarm.leave()
        private = private_swarm()
        await everyone(private, 1)
        here, given = visiting(private), token(private).to_text()
        for name, tool in TOOLS.items():
            with pytest.raises(TokenError, match="is private: give the token"):
                await tool(here.join, "")
            await tool(here.join, given)
            assert "nobody trains" not in capsys.readouterr().out, name
        here.as_founder()
        for tool in TOOLS.values():
            await tool(here.join, "")
        await private.leave()

    run_swarm(main())


def test_tools_beside_a_member_share_its_token_and_use_it_not_up(
    visiting: Callable[[SimulatedSwarm], Here], capsys: pytest.CaptureFixture[str]
) -> None:
    """Failed before: of a token for one peer, the tool or the node was refused, and "nobody trains" while all did."""

    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm, 1)
        given, here = token(swarm).to_text(), visiting(swarm)
        here.as_member(given)
        for tool in TOOLS.values():
            await tool(here.join, "")
        node = swarm.add(9, stage=1, token=given)
        await until(lambda: node.public_state == "serving")
        capsys.readouterr()
        for tool in TOOLS.values():
            await tool(here.join, "")
        assert "nobody trains" not in capsys.readouterr().out
        swarm.add(10, stage=1, token=given)
        assert "have used it" in str(await fails_to_join(swarm, 10))
        await swarm.leave()

    run_swarm(main())


def test_a_tool_that_is_told_no_address_visits_the_run_of_this_folder(
    visiting: Callable[[SimulatedSwarm], Here],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm, 1)
        here = visiting(swarm)
        for tool in TOOLS.values():
            with pytest.raises(JoinError, match="Name the run: --join"):
                await tool([], "")
        here.as_founder()
        for damaged in (b"", b"\xff", b"nowhere\n", b"/ip4/300.0.0.1/tcp/1/p2p/12D3\n"):
            (here.folder / "noloco-run" / ADDRESSES).write_bytes(damaged)
            with pytest.raises(JoinError, match="Name the run: --join"):
                await TOOLS["status"]([], "")
        keep_addresses(here.folder / "noloco-run", here.join)
        for tool in TOOLS.values():
            await tool([], "")
            assert "Looking at the run of noloco-run" in capsys.readouterr().err
        (here.folder / "noloco-run" / ADDRESSES).unlink()
        here.as_member(token(swarm).to_text())
        StateDirectory(here.folder / "noloco-state").save_peer_book(here.join)
        await TOOLS["status"]([], "")
        assert "Looking at the run of noloco-state" in capsys.readouterr().err
        (elsewhere := here.folder / "elsewhere").mkdir()
        places = [(here.folder / "noloco-state").resolve()]
        monkeypatch.setattr(credentials, "running_here", lambda: places)
        monkeypatch.chdir(elsewhere)
        await TOOLS["status"]([], "")
        assert "Looking at the run of" in capsys.readouterr().err
        places.append(here.as_founder("another"))
        keep_addresses(places[-1], here.join)
        with pytest.raises(JoinError, match="several are on this machine"):
            await TOOLS["status"]([], "")
        monkeypatch.chdir(places[-1])
        await TOOLS["status"]([], "")
        await swarm.leave()

    run_swarm(main())


def test_who_is_let_in_by_nobody_is_told_why(visiting: Callable[[SimulatedSwarm], Here]) -> None:
    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm, 1)
        here, revoked, full = visiting(swarm), token(swarm), token(swarm)
        entries = frozenset({revoked.invitation.serial})
        sealed = Revocations(swarm.network.now(), entries).sign(here.signed.run_id, OWNER)
        members = [swarm.seed_peer.rpc._door, *(node.member.rpc._door for node in swarm.nodes.values())]
        admissions = [door._admission for door in members if door is not None]
        assert len(admissions) == 5
        for admission in admissions:
            assert admission is not None
            admission.adopt(sealed)
            for number in range(LEAST_VISITORS):
                peer = Identity.from_seed("crowd", number).peer_id
                admission.check(peer, full.credential(peer))
        refused = {
            token(swarm, days=-1).to_text(): "has expired. Ask",
            revoked.to_text(): "has revoked the invitation. Ask",
            full.to_text(): "as many visitors .* Try again in a minute",
        }
        for text, told in refused.items():
            for tool in TOOLS.values():
                with pytest.raises(TokenError, match=told):
                    await tool(here.join, text)
        await swarm.leave()

    run_swarm(main())


def test_nodes_that_shut_a_visitor_out_are_not_taken_for_none(
    visiting: Callable[[SimulatedSwarm], Here],
) -> None:
    """Failed before: the seed peer let it in, no node did, and `noloco status` said that nobody trains."""

    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm, 1)
        here, given = visiting(swarm), token(swarm)
        sealed = Revocations(swarm.network.now(), frozenset({given.invitation.serial}))
        for node in swarm.nodes.values():
            node.member.membership.admission.adopt(sealed.sign(here.signed.run_id, OWNER))
        nodes = [node.transport.addresses()[0] for node in swarm.nodes.values()]
        with pytest.raises(TokenError, match=r"No node of run .* lets this visitor in"):
            await TOOLS["status"]([*here.join, *nodes], given.to_text())
        await swarm.leave()

    run_swarm(main())


def found(here: Here, given: str = "", named: tuple[Path, ...] = ()) -> str:
    from protocol.access.admission import Admission

    me = Identity.from_seed("a tool").peer_id
    return credentials.token_finder(given, named)(Admission(here.signed, me, here.swarm.network.now))


def test_where_a_token_is_found(
    visiting: Callable[[SimulatedSwarm], Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        swarm = private_swarm()
        here = visiting(swarm)
        assert found(here) == ""
        over, mine, named, elsewhere = (
            token(swarm, days=-1).to_text(), token(swarm).to_text(), token(swarm).to_text(), token(swarm).to_text()
        )  # fmt: skip
        here.as_member(over)
        assert found(here) == over  # so that it is told
        here.as_member(elsewhere, "elsewhere")
        monkeypatch.setattr(credentials, "running_here", lambda: [tmp_path / "elsewhere"])
        assert found(here) == elsewhere
        here.as_member(mine, "several/device-1")
        monkeypatch.setenv("NOLOCO_STATE_DIR", str(tmp_path / "several"))
        assert found(here) == mine
        run = here.as_founder()
        first, second = found(here), found(here)
        assert first != second, "each visit has a token of its own"
        assert not (run / VISIT_TOKEN).exists()
        here.as_member(named, "named")
        assert found(here, "", (tmp_path / "named",)) == named
        assert found(here, over, (tmp_path / "named",)) == over

        kept = kept_visit_token(run, here.signed)
        assert (run / VISIT_TOKEN).stat().st_mode & 0o777 == 0o600
        (run / RUN_KEY).unlink()
        assert found(here) == kept == kept_visit_token(run, here.signed)

    run_swarm(main())


def test_what_is_another_users_or_another_runs_is_passed_over(
    visiting: Callable[[SimulatedSwarm], Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        swarm = private_swarm()
        here = visiting(swarm)
        stranger = Identity.from_seed("another founder")
        other = SignedManifest.sign(here.signed.manifest, stranger)
        run = here.as_founder()
        (run / RUN_KEY).unlink()
        stranger.save(run / RUN_KEY)  # the key of another run beside this one's manifest
        assert found(here) == ""
        replace_whole(run / "manifest.noloco", other.to_bytes())
        here.as_member(Token.issue(other.run_id, stranger, None, 1, swarm.network.now() + DAY).to_text())
        here.as_member("noloco-nonsense", "named")
        assert found(here, "", (tmp_path / "named", tmp_path / "nowhere")) == ""
        here.as_member(token(swarm).to_text(), "mine")
        mine = (tmp_path / "mine",)
        assert found(here, "", mine)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert found(here, "", mine) == ""

    run_swarm(main())
