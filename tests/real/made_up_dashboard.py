"""A process with a dashboard of made-up members: `python made_up_dashboard.py MEMBERS STAGES [PORT]`.

It prints its address; each line on its standard input kills one member of the second stage.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bootstrap.dashboard.asking import Prompts
from bootstrap.dashboard.board import Measured, Sample
from bootstrap.dashboard.running import invitation, watched
from bootstrap.dashboard.sampling import givers_of
from bootstrap.dashboard.server import Pages, serve
from node.machine.listening import address_of, listen_at
from protocol.records.receipts import Contribution
from protocol.supervision import Supervisor
from tests.made_up_members import MadeUpSwarm
from tests.swarm.micro import micro_manifest, until

AGE = 1_500.0  # seconds that they have "trained" already
LIFETIME = 600.0
NAME = "<b>ada</b>"  # markup, which the page must show as text
TEXT = "The <i>values</i> are the same as those of the list,\nand the first one is returned."


async def main(members: int, stages: int, port: int = 0) -> None:
    loop, supervisor = asyncio.get_running_loop(), Supervisor()
    manifest = micro_manifest(
        name="common-corpus",
        stages=stages,
        model__layers=stages,
        limits__record_lifetime=LIFETIME,
        inner__total_steps=20_000,
        outer__inner_steps=50,
    )
    swarm = MadeUpSwarm(manifest, loop.time, AGE)
    await swarm.start(members)
    for member in (swarm.members[0], swarm.members[stages]):  # two of one stage
        member.name = NAME
        await member.announce()

    def kill() -> None:
        if sys.stdin.readline():
            supervisor.spawn(next(m for m in swarm.members if m.stage == 1).kill(), "killing")
        else:
            loop.remove_reader(sys.stdin)

    async with watched(await swarm.observer()) as board:
        loop.add_reader(sys.stdin, kill)
        await until(lambda: board.now.members >= members, seconds=300)
        board.note_sample(Sample(board.now.time, 3_000, 60, board.now.loss, TEXT))
        board.note_givers(givers_of([Contribution(swarm.members[0].peer, NAME, 1_200_000, 60, 3)]))
        began, join = board.now.time - AGE, invitation([f"/dns4/seed.example/tcp/1/p2p/{swarm.seed.peer_id}"])
        losses = [(began + at, int(900 * at), 5.6 - 3.2 * at / AGE) for at in (0.0, AGE / 2, AGE)]
        board.note_measured(Measured(held_out=True, points=losses, bigram=2.45))
        with listen_at("127.0.0.1", port, "--listen") as listening:
            print(address_of(listening), flush=True)

            async def write(prompt: str) -> Sample:
                return Sample(board.now.time, 3_001, 60, board.now.loss, f"{prompt} <u>so</u>")

            prompts = Prompts(write, board.note_sample)
            await serve(Pages(board, join=join, prompts=prompts), listening, asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
