"""Getting the run's tokenizer by the signed hashes of its pieces: each kind of liar costs one piece, and no time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory import memory_address
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership import tokenizer_pieces
from node.membership.data_source import RunTokenizer
from node.membership.tokenizer_peers import serve_tokenizer
from node.membership.tokenizer_pieces import IN_FLIGHT, LATE_AFTER, fetch_pieces, find_hashes
from node.membership.view import View
from node.storage.state_directory import StateDirectory
from protocol.errors import Refused, TokenizerError
from protocol.ground import PeerId
from protocol.messages.state import GetTokenizer, GetTokenizerHashes, TokenizerHashes, TokenizerPiece
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.piece_hashes import MAX_TOKENIZER_BYTES, TOKENIZER_PIECE_BYTES, PieceHashes
from tests.swarm.micro import guest_of, micro_corpus, peer_of, run_swarm, step_of, until
from tests.swarm.test_training_data import with_tokenizer
from tests.unit.tokenizers_made_here import bpe

PIECES = 9
RAW = bpe() + random.Random(3).randbytes(8).hex().encode() * (
    (PIECES * TOKENIZER_PIECE_BYTES - TOKENIZER_PIECE_BYTES // 2 - len(bpe())) // 16
)
MANIFEST = with_tokenizer(RAW)
OWNER = Identity.from_seed("run", 0)  # of a `SimulatedSwarm`
SEALED = PieceHashes.sign(RAW, MANIFEST.data.tokenizer, OWNER)
HASHES = PieceHashes.read(SEALED, MANIFEST.data.tokenizer, OWNER.public_key)
Lie = Callable[[int], Awaitable[bytes]]  # from the number of a piece to what is given for it


def piece(index: int) -> bytes:
    return RAW[index * TOKENIZER_PIECE_BYTES :][:TOKENIZER_PIECE_BYTES]


def flipped(contents: bytes, at: int = 0) -> bytes:
    changed = bytearray(contents)
    changed[at] ^= 1
    return bytes(changed)


async def wrong_first(index: int) -> bytes:
    return flipped(piece(index)) if index == 0 else piece(index)


async def wrong_middle(index: int) -> bytes:
    return flipped(piece(index), TOKENIZER_PIECE_BYTES // 2) if index == PIECES // 2 else piece(index)


async def wrong_last(index: int) -> bytes:
    return flipped(piece(index), -1) if index == PIECES - 1 else piece(index)


async def wrong_everywhere(index: int) -> bytes:
    return bytes(len(piece(index)))


async def too_long(index: int) -> bytes:
    return (piece(index) + b" ")[:TOKENIZER_PIECE_BYTES] if index == PIECES - 1 else piece(index) + b" "


async def too_short(index: int) -> bytes:
    return piece(index)[:-1]


async def nothing(index: int) -> bytes:
    return b""


async def in_wrong_order(index: int) -> bytes:
    return piece((index + 1) % PIECES)


async def never(index: int) -> bytes:
    await asyncio.sleep(1e6)
    return b""


async def slowly(index: int) -> bytes:
    await asyncio.sleep(29.0)
    return piece(index)


async def refused(index: int) -> bytes:
    raise Refused("no-tokenizer")


async def honest(index: int) -> bytes:
    return piece(index)


LIES: list[Lie] = [
    wrong_first, wrong_middle, wrong_last, wrong_everywhere, too_long, too_short, nothing, in_wrong_order,
]  # fmt: skip
IDLE: list[Lie] = [never, slowly, refused]


async def giving(
    swarm: SimulatedSwarm, name: str, give: Lie, given: Counter[str], total: int = len(RAW)
) -> PeerId:
    """Start a peer that gives pieces so, and counts wrong ones; return its id."""

    async def on_get(request: Request[GetTokenizer]) -> Answer[TokenizerPiece]:
        index = request.message.offset // TOKENIZER_PIECE_BYTES
        contents = await give(index)
        if contents != piece(index):
            given[guest.transport.peer_id] += 1
        # what the message itself does not allow is written past its bounds, as a liar would
        return Answer(TokenizerPiece.model_construct(total=total, contents=contents))

    guest = await guest_of(swarm, name)
    guest.handle(GetTokenizer.answered_by(on_get))
    await guest.start()
    return guest.transport.peer_id


def struck_by(asker: Rpc) -> Counter[str]:
    struck, strike = Counter[str](), asker.strike
    asker.strike = lambda peer: (struck.update([peer]), strike(peer))[1]  # type: ignore[method-assign]
    return struck


@pytest.mark.parametrize("lie", [*LIES, *IDLE], ids=lambda lie: lie.__name__)
def test_a_liar_of_each_kind_costs_one_piece_and_holds_nobody_up(
    lie: Lie, caplog: pytest.LogCaptureFixture
) -> None:
    """Six of one kind beside one honest peer, whoever is asked first."""

    async def main(draw: int) -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus(), seed=draw)
        asker, given = await guest_of(swarm, "asker"), Counter[str]()
        struck = struck_by(asker)
        peers = [await giving(swarm, f"liar {number}", lie, given) for number in range(6)]
        good = await giving(swarm, "honest", honest, given)
        clock = asyncio.get_running_loop().time
        began = clock()
        assert await fetch_pieces(asker, [*peers, good], HASHES, random.Random(draw)) == RAW
        assert all(count <= 1 for count in given.values()), given
        assert good not in struck
        assert set(struck) == set(given), "who gave something wrong, and nobody else, is struck"
        assert clock() - began <= 3 * LATE_AFTER + 10.0
        for liar in given:
            assert caplog.text.count(f"Peer {liar[-8:]} gave a piece") == 1

    for draw in range(2):
        caplog.clear()
        run_swarm(main(draw))


def test_liars_of_all_kinds_at_once_are_survived() -> None:
    async def main() -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus())
        asker, given = await guest_of(swarm, "asker"), Counter[str]()
        peers = [
            await giving(swarm, f"{lie.__name__} {number}", lie, given, total=MAX_TOKENIZER_BYTES)
            for lie in [*LIES, *IDLE]
            for number in range(3)
        ]
        peers.insert(17, await giving(swarm, "honest", honest, given))
        assert await fetch_pieces(asker, peers, HASHES, random.Random(1)) == RAW
        assert set(given.values()) <= {1}

    run_swarm(main())


@pytest.mark.parametrize("give", [refused, nothing, never], ids=lambda give: give.__name__)
def test_where_nobody_gives_the_pieces_it_ends(give: Lie) -> None:
    async def main() -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus())
        asker, given = await guest_of(swarm, "asker"), Counter[str]()
        peers = [await giving(swarm, f"{number}", give, given) for number in range(5)]
        assert await fetch_pieces(asker, peers, HASHES, random.Random(1)) is None
        assert await fetch_pieces(asker, [], HASHES, random.Random(1)) is None

    run_swarm(main())


def test_the_only_peer_gives_several_pieces_at_once() -> None:
    most = now = 0

    async def counted(index: int) -> bytes:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(1.0)
        now -= 1
        return piece(index)

    async def main() -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus())
        asker = await guest_of(swarm, "asker")
        seed = await giving(swarm, "seed", counted, Counter())
        assert await fetch_pieces(asker, [seed], HASHES, random.Random(1)) == RAW

    run_swarm(main())
    assert most == IN_FLIGHT


def test_a_slow_line_is_not_filled_with_second_questions() -> None:
    """All answers take eight seconds, as on a line of half a megabit: some are asked for twice, and it comes."""
    asked = 0

    async def late(index: int) -> bytes:
        nonlocal asked
        asked += 1
        await asyncio.sleep(8.0)
        return piece(index)

    async def main() -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus())
        asker = await guest_of(swarm, "asker")
        peers = [await giving(swarm, f"{number}", late, Counter()) for number in range(12)]
        assert await fetch_pieces(asker, peers, HASHES, random.Random(1)) == RAW

    run_swarm(main())
    assert asked <= PIECES + IN_FLIGHT


# --- the hashes ---------------------------------------------------------------------------------

OTHER = Identity.from_seed("somebody else")
FALSE = {
    "of another owner": PieceHashes.sign(RAW, MANIFEST.data.tokenizer, OTHER),
    "of another file": PieceHashes.sign(RAW[:-1], with_tokenizer(RAW[:-1]).data.tokenizer, OWNER),
    "cut": SEALED[:-32],
    "longer": SEALED + SEALED[-32:],
    "in another order": SEALED[:64] + SEALED[96:128] + SEALED[64:96] + SEALED[128:],
    "no whole number": SEALED[:-1],
    "a signature alone": SEALED[:64],
    "one bit": flipped(SEALED, 70),
}


def hashes_of(sealed: bytes | None) -> Any:
    async def on_hashes(request: Request[GetTokenizerHashes]) -> Answer[TokenizerHashes]:
        if sealed is None:
            await asyncio.sleep(1e6)
        return Answer(TokenizerHashes(sealed=sealed or b""))

    return GetTokenizerHashes.answered_by(on_hashes)


@pytest.mark.parametrize("name", [*FALSE, "never answers", "no hashes", "an earlier version"])
def test_a_list_that_the_owner_did_not_sign_is_refused_and_the_next_peer_is_asked(name: str) -> None:
    async def main() -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus())
        asker = await guest_of(swarm, "asker")
        struck, peers = struck_by(asker), []
        for number in range(40):
            guest = await guest_of(swarm, f"{number}")
            if number == 11:
                guest.handle(hashes_of(SEALED))
            elif name == "no hashes":
                serve_tokenizer(guest, lambda: RAW)
            elif name != "an earlier version":
                guest.handle(hashes_of(FALSE.get(name)))
            await guest.start()
            peers.append(guest.transport.peer_id)
        signed, honest_one = swarm.seed_peer.signed, peers[11]
        began = asyncio.get_running_loop().time()
        assert await find_hashes(asker, peers, signed, random.Random(4)) == SEALED
        assert honest_one not in struck
        assert bool(struck) == (name in FALSE)
        peers.remove(honest_one)
        assert await find_hashes(asker, peers, signed, random.Random(4)) == b""
        assert asyncio.get_running_loop().time() - began <= 2 * tokenizer_pieces.HASHES_SECONDS + 1.0

    run_swarm(main())


# --- the run ------------------------------------------------------------------------------------


def test_members_keep_the_hashes_and_hand_them_on_when_the_founder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def by_whole(*args: object) -> bytes:
        raise AssertionError("the file was fetched whole")

    monkeypatch.setattr("node.membership.data_source.fetch_tokenizer", by_whole)

    async def main() -> None:
        swarm = SimulatedSwarm(MANIFEST, micro_corpus(), directory=tmp_path, tokenizer=RAW)
        await swarm.start(1)
        await until(lambda: all(step_of(node) >= 2 for node in swarm.nodes.values()))
        await swarm.seed_peer.close()
        late = swarm.add(2, stage=0, join=memory_address(peer_of(swarm.nodes[1])))
        await until(lambda: step_of(late) >= 1 and late.public_state == "serving")
        late.stop()
        await swarm.tasks[2]
        again = swarm.add(2, stage=0, join=memory_address(peer_of(swarm.nodes[1])))
        await until(lambda: step_of(again) >= 1 and again.public_state == "serving")
        assert again.member.tokenizer.hashes == SEALED, "also after a restart"
        for number in range(3):
            assert (tmp_path / f"node-{number}" / "tokenizer.json").read_bytes() == RAW
            assert (tmp_path / f"node-{number}" / "tokenizer.hashes").read_bytes() == SEALED
        for number, node in swarm.nodes.items():
            node.stop()
            await swarm.tasks[number]

    run_swarm(main())


async def newcomer(
    swarm: SimulatedSwarm,
    sources: Mapping[str, tuple[Lie, bytes]],
    given: Counter[str],
    state: StateDirectory | None = None,
) -> RunTokenizer:
    """A peer connected with those `sources`: what each gives for a piece, and as hashes."""
    asker = await guest_of(swarm, "asker")
    for name, (give, sealed) in sources.items():
        guest = await guest_of(swarm, name)

        async def on_get(
            request: Request[GetTokenizer], name: str = name, give: Lie = give
        ) -> Answer[TokenizerPiece]:
            given[name] += 1
            contents = await give(request.message.offset // TOKENIZER_PIECE_BYTES)
            return Answer(TokenizerPiece.model_construct(total=len(RAW), contents=contents))

        guest.handle(GetTokenizer.answered_by(on_get))
        if sealed:
            guest.handle(hashes_of(sealed))
        await guest.start()
        await asker.transport.connect([memory_address(guest.transport.peer_id)], 5.0)
    return RunTokenizer(swarm.seed_peer.signed, asker, View(), state)


def test_one_with_hashes_is_enough_and_earlier_versions_give_pieces_beside_it() -> None:
    async def main() -> None:
        swarm, given = SimulatedSwarm(MANIFEST, micro_corpus()), Counter[str]()
        liars = {f"liar {number}": (wrong_everywhere, b"") for number in range(20)}
        sources = {**liars, "earlier": (honest, b""), "today": (refused, SEALED)}
        tokenizer = await newcomer(swarm, sources, given)
        await tokenizer.get()
        assert (tokenizer.raw, tokenizer.hashes) == (RAW, SEALED)
        assert given["earlier"] >= PIECES
        assert all(given[name] <= 1 for name in liars)

    run_swarm(main())


def test_a_run_founded_before_is_fetched_whole_and_has_no_hashes(tmp_path: Path) -> None:
    async def main() -> None:
        swarm, given = SimulatedSwarm(MANIFEST, micro_corpus()), Counter[str]()
        state = StateDirectory(tmp_path / "node")
        state.open()
        tokenizer = await newcomer(swarm, {"earlier": (honest, b"")}, given, state)
        await tokenizer.get()
        assert (tokenizer.raw, tokenizer.hashes) == (RAW, b"")
        assert not (tmp_path / "node" / "tokenizer.hashes").exists()
        state.close()

    run_swarm(main())


def test_what_the_owner_signed_of_another_file_does_not_keep_the_right_one_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        swarm, given = SimulatedSwarm(MANIFEST, micro_corpus()), Counter[str]()
        other = flipped(RAW, -1)
        mistaken = PieceHashes.sign(other, MANIFEST.data.tokenizer, OWNER)

        async def both(index: int) -> bytes:  # what fits the hashes first, then the run's
            contents = other if given["earlier"] <= PIECES else RAW
            return contents[index * TOKENIZER_PIECE_BYTES :][:TOKENIZER_PIECE_BYTES]

        tokenizer = await newcomer(swarm, {"earlier": (both, mistaken)}, given)
        await tokenizer.get()
        assert (tokenizer.raw, tokenizer.hashes) == (RAW, b"")

    run_swarm(main())
    assert "signed the pieces of another tokenizer" in caplog.text


def test_liars_alone_end_in_a_sentence() -> None:
    async def main() -> None:
        swarm, given = SimulatedSwarm(MANIFEST, micro_corpus()), Counter[str]()
        tokenizer = await newcomer(swarm, {"liar": (wrong_everywhere, SEALED)}, given)
        with pytest.raises(TokenizerError, match=r"none of 1 peers gave it.*--tokenizer FILE"):
            await tokenizer.get()
        assert given["liar"] <= IN_FLIGHT

    run_swarm(main())
