"""A seed peer's invitation by words: given once, to a newcomer that knows them, for ten minutes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.creating.invitation import in_words
from bootstrap.creating.run import RUN_KEY, found, introduce
from bootstrap.creating.words_of_seed import (
    EXCHANGES,
    INVITATION,
    MOST_PENDING,
    OVER,
    WordAnswers,
    invite_by_words,
)
from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.tools_cli import app as tools
from node.membership.by_words import exchange
from protocol.access.tokens import Token
from protocol.access.word_exchange import NewcomersSide
from protocol.access.words import LIFE_SECONDS, MOST_TRIES, PROOF_BYTES, read_words
from protocol.errors import MEND, JoinError, NolocoError, Refused, TokenError
from protocol.messages import Traffic
from protocol.messages.frame import FrameType
from protocol.messages.peers import Invited, ProveWords, TryWords, WordsTried
from protocol.records.identity import Identity
from protocol.rpc.frames import read_frame, write_frame
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.manifest import Access, load_preset
from tests.unit.test_commands_speak import PEER as ADDRESS
from tests.unit.test_commands_speak import TOKEN
from tests.unit.test_tokens import OWNER, RUN
from tests.unit.two_peers import Two, two_peers

REST = 1 / EXCHANGES[0][1]  # seconds until a peer may try again
WRONG = "acorn-acorn-acorn"


@dataclass
class Inviting:
    """A seed peer, a newcomer, and the invitation in the run's directory."""

    two: Two
    directory: Path
    words: str = ""
    token: str = ""

    def invite(self) -> None:
        now = self.two.network.now()
        self.token = Token.issue(RUN, OWNER, None, 1, now + 86_400.0).to_text()
        self.words = invite_by_words(self.directory, self.token, now)

    def start_again(self) -> WordAnswers:
        answers = WordAnswers(self.two.address, self.directory, self.two.network.now)
        answers.serve(self.two.server)
        return answers

    async def another(self, name: str) -> Rpc:
        transport = MemoryTransport(self.two.network, Identity.from_seed(name))
        await transport.start()
        return Rpc(transport)

    async def tried(self, words: str = "", rpc: Rpc | None = None) -> str:
        rpc = rpc or self.two.caller
        return await exchange(rpc, rpc.transport, self.two.address, words or self.words)


@asynccontextmanager
async def inviting(directory: Path) -> AsyncIterator[Inviting]:
    async with two_peers() as two:
        seed = Inviting(two, directory)
        seed.start_again()
        seed.invite()
        yield seed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path


def in_time(test: Callable[[Inviting], Awaitable[None]]) -> Callable[[Path], Awaitable[None]]:
    """Run under the virtual clock, with pytest's fixtures."""

    async def with_fixtures(run: Path) -> None:
        async with inviting(run) as seed:
            await test(seed)

    with_fixtures.__doc__ = test.__doc__
    return with_fixtures


@in_time
async def test_the_words_give_the_token_once(seed: Inviting) -> None:
    assert (seed.directory / INVITATION).stat().st_mode & 0o777 == 0o600
    assert await seed.tried() == seed.token
    for newcomer in (None, await seed.another("a second one")):
        with pytest.raises(TokenError, match="have been used"):
            await seed.tried(rpc=newcomer)
    seed.start_again()
    with pytest.raises(TokenError, match="have been used"):
        await seed.tried()
    seed.invite()
    assert await seed.tried() == seed.token


@in_time
async def test_of_an_open_run_they_give_the_seed_peers_word_alone(seed: Inviting) -> None:
    seed.words = invite_by_words(seed.directory, "", seed.two.network.now())
    assert await seed.tried() == ""


@in_time
async def test_three_wrong_tries_end_the_words_whoever_makes_them(seed: Inviting) -> None:
    for number in range(MOST_TRIES):
        with pytest.raises(TokenError, match="not the words"):
            await seed.tried(WRONG, await seed.another(f"guesser {number}"))
    with pytest.raises(TokenError, match="tried wrongly three times"):
        await seed.tried()
    seed.start_again()
    with pytest.raises(TokenError, match="tried wrongly three times"):
        await seed.tried()


@in_time
async def test_two_wrong_tries_leave_the_right_one(seed: Inviting) -> None:
    for number in range(MOST_TRIES - 1):
        with pytest.raises(TokenError, match="not the words"):
            await seed.tried(WRONG, await seed.another(f"guesser {number}"))
    assert await seed.tried() == seed.token


@in_time
async def test_a_seed_peer_that_is_started_again_remembers_wrong_tries(seed: Inviting) -> None:
    for number in range(MOST_TRIES):
        with pytest.raises(TokenError, match="not the words"):
            await seed.tried(WRONG, await seed.another(f"guesser {number}"))
        seed.start_again()
    with pytest.raises(TokenError, match="tried wrongly three times"):
        await seed.tried()
    seed.invite()
    assert await seed.tried() == seed.token


@in_time
async def test_they_last_ten_minutes(seed: Inviting) -> None:
    await asyncio.sleep(LIFE_SECONDS)
    with pytest.raises(TokenError, match="expired"):
        await seed.tried()


@in_time
async def test_without_an_invitation_there_is_nothing_to_try(seed: Inviting) -> None:
    (seed.directory / INVITATION).unlink()
    with pytest.raises(TokenError, match="has no invitation by words"):
        await seed.tried()
    for damaged in (b"{", b"[]", b"\xff", b'{"number": 1}', b"[" * 5_000, b" " * 10_000):
        (seed.directory / INVITATION).write_bytes(damaged)
        await asyncio.sleep(REST)
        with pytest.raises(TokenError, match="has no invitation by words"):
            await seed.tried()


@in_time
async def test_words_that_may_be_used_are_not_given_again(seed: Inviting) -> None:
    """What became of them cannot be read: damaged, or another user's, or there are no open files left."""
    assert await seed.tried() == seed.token
    for damaged in (b"", b"{", b"[]", b" " * 10_000):
        (seed.directory / OVER).write_bytes(damaged)
        await asyncio.sleep(REST)
        with pytest.raises(JoinError, match="cannot read"):
            await seed.tried()


@in_time
async def test_a_peer_that_gives_no_words_is_told_from_one_that_has_none(seed: Inviting) -> None:
    seed.two.server.stop_handling(TryWords, ProveWords)
    with pytest.raises(JoinError, match="gives no invitation by words"):
        await seed.tried()


# --- what people see ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "at"),
    [
        (["/ip4/127.0.0.1/tcp/31337/p2p/A", "/ip4/203.0.113.7/tcp/31337/p2p/A"], "203.0.113.7"),
        (["/ip4/192.168.0.5/tcp/4001/p2p/A"], "192.168.0.5:4001"),
        (["/ip6/2001:db8::7/tcp/31337/p2p/A"], "[2001:db8::7]"),
        ([], "HOST"),
    ],
)
def test_the_line_to_join_with(addresses: list[str], at: str) -> None:
    assert in_words(addresses, "blue-walnut-lamp") == f"noloco join blue-walnut-lamp --at {at}"


PRIVATE = load_preset("tiny").model_copy(update={"access": Access(private=True)})


def test_a_founder_types_it(tmp_path: Path) -> None:
    for name, manifest in (("private", PRIVATE), ("open", load_preset("tiny"))):
        found(tmp_path / name, manifest)
        told = CliRunner().invoke(tools, ["invite", "--words", "--state-dir", str(tmp_path / name)])
        assert told.exit_code == 0, told.output
        assert read_words(told.stdout.strip()) in told.stderr
        kept = json.loads((tmp_path / name / INVITATION).read_text())
        assert bool(kept["token"]) == (name == "private")
    refused = CliRunner().invoke(
        tools, ["invite", "--words", "--delegate", "x", "--state-dir", str(tmp_path)]
    )
    assert (refused.exit_code, "--words is for the seed peer" in refused.stderr) == (MEND, True)


@pytest.mark.parametrize(
    ("is_private", "begins"),
    [(True, "NOLOCO_TOKEN=$(noloco invite --state-dir {}) noloco join "), (False, "noloco join ")],
    ids=["private", "open"],
)
def test_a_founder_gets_the_line_that_serves_the_own_text_as_it_stands(
    is_private: bool, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = "/ip4/127.0.0.1/tcp/31337/p2p/A", "/ip4/203.0.113.7/tcp/31337/p2p/A"
    manifest = PRIVATE if is_private else load_preset("tiny")
    founded = replace(found(tmp_path, manifest), text="my texts/*.txt")
    introduce(founded, [far, near], None)
    line = f"    {begins.format(tmp_path)}{near} --data 'my texts/*.txt'\n"
    assert line in capsys.readouterr().out


def test_founding_shows_them_on_a_terminal_and_in_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    founded, addresses = found(tmp_path, PRIVATE), ["/ip4/203.0.113.7/tcp/31337/p2p/A"]
    introduce(founded, addresses, None)
    assert "--at" not in capsys.readouterr().out
    assert not (tmp_path / INVITATION).exists()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    introduce(founded, addresses, None)
    kept = json.loads((tmp_path / INVITATION).read_text())
    assert f"noloco join {kept['words']} --at 203.0.113.7\n" in capsys.readouterr().out
    introduce(founded, addresses, None)
    assert f"noloco join {kept['words']} --at 203.0.113.7\n" in capsys.readouterr().out, (
        "they may be on their way"
    )
    (tmp_path / RUN_KEY).unlink()
    introduce(founded, addresses, None)
    assert "--at" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("blue-walnut-lamp", "Say where the run's seed peer is"),
        ("blue walnut lamb --at seed", "Did you mean 'lamp'"),
        ("blue-walnut-lamp --at seed/x", "is not HOST or HOST:PORT"),
        (f"blue-walnut-lamp --at seed --join {ADDRESS}", "give one of them"),
        (f"blue-walnut-lamp --at seed --token {TOKEN}", "leave out --token"),
        (f"--at seed --join {ADDRESS}", "--at goes with the words"),
    ],
)
def test_a_newcomer_is_told_at_once(typed: str, told: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(tools, ["join", *typed.split(), "--state-dir", str(tmp_path)])
    assert answer.exit_code == MEND
    assert told in " ".join(answer.stderr.split())


# --- attacks --------------------------------------------------------------------------------------


@in_time
async def test_a_proof_counts_for_its_own_exchange_alone(seed: Inviting) -> None:
    """A replay: of a proof without an exchange, of one twice, and of another peer's."""
    caller, at = seed.two.caller, seed.two.address
    with pytest.raises(Refused, match="no exchange"):
        await caller.call(at, ProveWords(proof=bytes(PROOF_BYTES)), deadline=5.0)
    side = NewcomersSide(seed.words, caller.transport.peer_id, at)
    tried, _ = await caller.call(at, TryWords(message=side.message), deadline=5.0)
    proof = side.proof(tried.message)
    thief = await seed.another("a thief")
    with pytest.raises(Refused, match="no exchange"):
        await thief.call(at, ProveWords(proof=proof), deadline=5.0)
    await thief.call(at, TryWords(message=side.message), deadline=5.0)
    with pytest.raises(Refused, match="not the words"):
        await thief.call(at, ProveWords(proof=proof), deadline=5.0)
    with pytest.raises(Refused, match="no exchange"):
        await thief.call(at, ProveWords(proof=proof), deadline=5.0)
    assert side.open((await caller.call(at, ProveWords(proof=proof), deadline=5.0))[0].sealed) == seed.token


@in_time
async def test_an_exchange_that_began_with_other_words_ends_with_them(seed: Inviting) -> None:
    caller, at = seed.two.caller, seed.two.address
    side = NewcomersSide(seed.words, caller.transport.peer_id, at)
    tried, _ = await caller.call(at, TryWords(message=side.message), deadline=5.0)
    seed.invite()
    with pytest.raises(Refused, match="no exchange"):
        await caller.call(at, ProveWords(proof=side.proof(tried.message)), deadline=5.0)


@in_time
async def test_garbage_is_a_breach_and_no_try(seed: Inviting) -> None:
    caller, at = seed.two.caller, seed.two.address
    stream = await caller.transport.open(at, Traffic.CONTROL.protocol, 5.0)
    bodies = [
        {"message": b"A" + bytes(32)}, {"message": b""}, {"message": bytes(1 << 15)}, {"message": "A" * 33}, {},
    ]  # fmt: skip
    for number, body in enumerate(bodies):
        await write_frame(stream, FrameType.REQUEST, number, TryWords.kind, body)
        assert (await read_frame(stream, 1 << 20)).kind == "malformed"
    stream.close()
    await asyncio.sleep(REST)
    assert await seed.tried() == seed.token


@in_time
async def test_who_begins_many_exchanges_takes_little_and_learns_nothing(seed: Inviting) -> None:
    """A crowd that proves nothing: no try is counted, a few exchanges a second are begun, and few are kept."""
    all_, rate = EXCHANGES[1]
    answers, at, begun = seed.start_again(), seed.two.address, 0
    began = seed.two.network.now()
    for number in range(MOST_PENDING):
        guest = await seed.another(f"guest {number}")
        side = NewcomersSide(WRONG, guest.transport.peer_id, at)
        try:
            await guest.call(at, TryWords(message=side.message), deadline=5.0)
            begun += 1
        except NolocoError:
            continue
    assert begun <= all_ + rate * (seed.two.network.now() - began) + 1
    assert f"Exchanges: {begun} wait" in repr(answers)
    await asyncio.sleep(all_ / rate)
    assert await seed.tried() == seed.token


@in_time
async def test_a_peer_that_knows_no_words_gives_no_token(seed: Inviting) -> None:
    """An impostor at the seed peer's place gets one guess, and its token is not taken."""

    async def on_try(request: Request[TryWords]) -> Answer[WordsTried]:
        side = NewcomersSide(WRONG, request.peer, seed.two.address)
        return Answer(WordsTried(message=b"B" + side.message[1:]))

    async def on_proof(request: Request[ProveWords]) -> Answer[Invited]:
        return Answer(Invited(sealed=b"noloco-this-is-a-token-that-nobody-should-take"))

    seed.two.server.handle(TryWords.answered_by(on_try), ProveWords.answered_by(on_proof))
    with pytest.raises(TokenError, match="does not know the words"):
        await seed.tried()


@in_time
async def test_the_token_is_not_given_when_its_use_cannot_be_written_down(seed: Inviting) -> None:
    (seed.directory / OVER).mkdir()
    with pytest.raises(JoinError, match="refuses that now"):
        await seed.tried()
    (seed.directory / OVER).rmdir()
    await asyncio.sleep(REST)
    assert await seed.tried() == seed.token
    assert json.loads((seed.directory / OVER).read_text())["why"] == "used"
