"""The summary that a local swarm leaves behind, in summary.json and on screen; the tokens that it has trained on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bootstrap.display import write_whole
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.table import percent
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId
from protocol.messages.peers import NodeStats

Curve: TypeAlias = Sequence[tuple[int, float]]  # tokens, nats
MOST_COUNTED = 4_096  # peers


@dataclass
class Summary:
    """Filled while the swarm runs; every number was measured in this run.

    The names are those of summary.json, which `bootstrap.dashboard.measured` and scripts of people read.
    """

    run_id: str = ""
    preset: str = ""
    unit: str = "byte"  # what a token is
    complete: bool = False  # all steps are done
    total_steps: int = 0
    began: float = 0.0  # wall clock; the seconds below count from here
    wall_seconds: float = 0.0
    tokens: int = 0
    validation_loss: list[tuple[int, float, float]] = field(default_factory=list)  # tokens, seconds, nats
    is_held_out: bool = (
        True  # what the losses are on; of a little text nothing is, and they are on what is trained on
    )
    sequences: tuple[int, int] = (0, 0)  # that the last loss is on, of how many; fewer on a slow machine
    unigram_entropy: float | None = None  # of the held-out text, where bytes are tokens
    bigram_entropy: float | None = None
    replica_spread: float | None = None  # measured on all replicas' weights at the end
    replica_spread_estimate: float | None = None  # on a sample of them
    export: dict[str, Any] | None = None
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    chaos: dict[str, Any] | None = None  # of `--chaos`: the disturbed run beside the undisturbed one

    def add_node(self, name: str, peer: str, stats: NodeStats, names: Mapping[PeerId, str]) -> None:
        self.nodes[name] = {
            "peer": peer,
            "stage": stats.stage,
            "steps": stats.step,
            "rounds": stats.round,
            "pair_averagings": stats.pair_averagings,
            "distinct_partners": len(stats.partners),
            "partners": {names.get(PeerId(partner), partner): n for partner, n in stats.partners.items()},
            "sent": {names.get(PeerId(receiver), receiver): n for receiver, n in stats.sent.items()},
            "received": stats.received,
            "resends": stats.resends,
            "tokens_per_second": round(stats.tokens / stats.uptime, 1) if stats.uptime else 0.0,
            "seconds_blocked_in_gossip": round(stats.blocked_seconds, 3),
            "gossip_bytes": stats.gossip_bytes,
            "compute_fraction": stats.compute_fraction,  # of the time since the node joined
            "recent_compute_fraction": stats.recent_compute_fraction,
            "data_wait_fraction": stats.data_wait_fraction,  # of the time in which stage 0 trained
            "replica_spread_expected": stats.expected_spread,
        }

    def write(self, path: Path) -> None:
        """Write it to a file. Raises `StateError` when that fails; what was there before is then as it was."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n", "Choose another file with --summary.")

    def lines(self) -> list[str]:
        """The summary for people."""
        if not self.validation_loss:
            return ["The swarm ended before a loss was measured."]
        first, last = self.validation_loss[0], self.validation_loss[-1]
        kind = "validation loss" if self.is_held_out else "training loss"
        is_measured = len(self.validation_loss) > 1
        end = f"end {last[2]:.3f}" if is_measured else "(ended before it was measured again)"
        earlier = f", at {last[0]:,} tokens" if is_measured and last[0] < self.tokens else ""
        measured, whole = self.sequences
        part = f", on {measured} of {whole} sequences: this machine is slow" if measured < whole else ""
        lines = [
            "",
            f"{kind:<17}start {first[2]:.3f}   {end} nats per {self.unit}{earlier}{part}",
            f"trained          {self.tokens:,} tokens in {self.wall_seconds:.0f} s "
            f"({self.tokens / max(self.wall_seconds, 1e-9):,.0f} tokens/s, start-up and evaluation included)",
        ]
        if self.unigram_entropy is not None and self.bigram_entropy is not None:
            verdict = "below" if last[2] < self.bigram_entropy else "not below"
            entropies = f"unigram {self.unigram_entropy:.3f}   bigram {self.bigram_entropy:.3f}"
            compared = f"   (the end is {verdict} the bigram's)" if is_measured else ""
            lines.insert(2, f"same text        {entropies}{compared}")
        if self.replica_spread is not None:
            lines.append(f"replica spread   {self.replica_spread:.2e}")
        elif self.replica_spread_estimate is not None:
            lines.append(f"replica spread   {self.replica_spread_estimate:.2e} on a sample of the weights")
        if self.export is not None:
            lines.append(f"export           {self.export['directory']}: {self._export_beside(self.export)}")
        if self.nodes:
            lines.append(f"computing        {self._computing()} of the time since joining")
        if self.export is not None:
            place = shlex.quote(self.export["directory"])
            lines.append(f"go on            noloco generate 'def ' --model {place}")
        return lines

    def end_in_words(self) -> str:
        """ "Training is complete: step 1,000 of 1,000", or where it was stopped and by what."""
        step = max((node["steps"] for node in self.nodes.values() if node["stage"] == 0), default=0)
        of = f"step {step:,} of {self.total_steps:,}"
        return f"Training is complete: {of}" if self.complete else f"Training stopped at {of} (time over)"

    @staticmethod
    def _export_beside(export: dict[str, Any]) -> str:
        """Say the export's loss by transformers beside the swarm's, or that it was not loaded, and why."""
        swarm = f"swarm {export['swarm_loss']:.6f}"
        if "not_loaded" in export:
            return f"{swarm}; not loaded to compare. {export['not_loaded']}"
        return f"transformers {export['loss']:.6f}, {swarm}, difference {export['difference']:.1e}"

    def _computing(self) -> str:
        """The fraction of time in training work, as a mean over each stage's replicas."""
        stages: dict[int, list[float]] = {}
        for node in self.nodes.values():
            known = stages.setdefault(node["stage"], [])
            if node["compute_fraction"] is not None:
                known.append(node["compute_fraction"])
        return ", ".join(
            f"stage {stage} {percent(sum(known) / len(known) if known else None)}"
            for stage, known in sorted(stages.items())
        )


class TokenCount:
    """Adds up the tokens that a swarm has trained on, over restarts of its nodes.

    Mutable state: what each node of the first stage said last, and what it had trained on in earlier lives.

    A node that goes on from its checkpoint goes on with its count; what it had done since then is lost to the model,
    and so to this. One that takes others' state counts from zero: its earlier lives are in the model.
    """

    def __init__(self) -> None:
        self._said = PeerTable[int](MOST_COUNTED)
        self._before = PeerTable[int](MOST_COUNTED)

    @property
    def total(self) -> int:
        return sum(self._said.values()) + sum(self._before.values())

    def note(self, sightings: Iterable[Sighting]) -> None:
        for sighting in sightings:
            peer, stats = sighting.member.peer, sighting.stats
            if stats is None or stats.stage != 0 or stats.state == "joining":  # it may be reading its count
                continue
            last = self._said.get(peer, 0)
            if stats.tokens < last / 2:  # a checkpoint is not that old
                self._before[peer] = self._before.get(peer, 0) + last
            self._said[peer] = stats.tokens


@dataclass(frozen=True)
class Run:
    """`tokens` trained in `seconds`, from the moment that all trained; `present` is the mean share of nodes there."""

    tokens: int = 0
    seconds: float = 0.0
    present: float = 1.0
    losses: Curve = ()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0
