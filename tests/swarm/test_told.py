"""What a node under the virtual clock tells its volunteer: lines, warnings taken back, tokens over several lives."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from node.config import NodeConfig
from node.service.telling import LINE_SECONDS, Teller
from node.storage.state_directory import StateDirectory
from node.watch.phases import Phases
from node.watch.time_use import TimeUse
from protocol.messages.peers import GetStats
from protocol.transport.base import Transport
from tests.swarm.micro import FOREVER, micro_swarm, run_swarm, step_of, until


def test_a_line_every_half_minute_and_tokens_that_add_up_over_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "noloco")
    monkeypatch.setattr(Transport, "passed_on", property(lambda self: 3 << 20))
    state = StateDirectory(tmp_path)
    config = NodeConfig(state_dir=tmp_path, max_minutes=10)

    async def main() -> list[int]:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        swarm.seconds = lambda stage, priority: 0.3
        await swarm.start(1)
        node, given = swarm.nodes[0], [0]
        await until(lambda: step_of(node) >= 3)
        for _ in range(2):
            loop = asyncio.get_running_loop()
            teller = Teller(config, state, TimeUse(clock=loop.time), Phases(), None)
            telling = loop.create_task(teller.run(lambda: node.service))
            before = node.context.throughput.tokens
            await asyncio.sleep(2.2 * LINE_SECONDS)
            telling.cancel()
            teller.end(node.service)
            given.append(given[-1] + node.context.throughput.tokens - before)
            stats, _ = await swarm.seed_peer.rpc.call(node.transport.peer_id, GetStats(), deadline=5.0)
            assert stats.passed_on == 3 << 20
            assert state.given() == pytest.approx(given[-1], rel=0.1)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()
        return given

    given = run_swarm(main())
    lines = [line for line in caplog.messages if line.startswith("Step ")]
    assert len(lines) == 4
    assert all("tokens/s, busy " in line and "tokens given in all" in line for line in lines)
    assert "about 9.5 min left" in lines[0]
    assert ", 3.0 MiB passed on for others, " in lines[0]
    farewells = [line for line in caplog.messages if line.startswith("This node was here for 66 s")]
    assert len(farewells) == 2
    assert farewells[0].endswith(f"noloco join --state-dir={tmp_path} --max-minutes=10.0")
    assert given[2] > given[1] > 0


def test_a_warning_that_no_longer_holds_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "noloco")

    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        first = swarm.add(0, stage=0)
        await until(lambda: any("No live peer serves stage 1" in line for line in caplog.messages))
        phases = first.member.events.phases
        assert phases.missing() == "Missing before anything is trained: stage 1."
        assert phases.missing() == "Missing before anything is trained: stage 1."
        swarm.add(1, stage=1)
        await until(lambda: step_of(first) >= 2)
        assert first.context.counters.no_peer_since is None
        assert not phases.doing
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
    warned = next(i for i, line in enumerate(caplog.messages) if "No live peer serves stage 1" in line)
    assert "Stage 1 is served again." in caplog.messages[warned:]


def test_a_last_stage_without_a_first_names_it_and_the_line_to_pass_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "node.service.service")

    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        last = swarm.add(0, stage=1)
        phases = last.member.events.phases
        await until(lambda: phases.doing == "waiting for the first step")
        assert phases.missing() == phases.missing() == "Missing before anything is trained: stage 0."
        swarm.add(1, stage=0)
        await until(lambda: not phases.missing())
        assert phases.detail() == "0 of 2 microbatches are through" or step_of(last)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
    lines = [line for line in caplog.messages if "Another machine serves stage" in line]
    assert len(lines) == 1, "however often it is looked at"
    assert "noloco join " in lines[0]
    assert lines[0].endswith(" --stage 0")


def test_every_line_to_join_with_of_a_hidden_node_names_its_peers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "node.service.service")
    way = "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWEXAMPLE"

    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        last = swarm.add(0, stage=1, relay=False)  # looks for no ways in by itself
        last.transport.joined_through = (way,)
        await until(lambda: any("Others may join" in line for line in caplog.messages))
        assert "stage 0" in last.member.events.phases.missing()
        swarm.kill(0)
        await swarm.leave()

    run_swarm(main())
    lines = [line for line in caplog.messages if "noloco join" in line]
    assert lines[0] == f"  noloco join {way}"
    assert lines[1:] == [f"Another machine serves stage 0 with: noloco join {way} --stage 0"]
