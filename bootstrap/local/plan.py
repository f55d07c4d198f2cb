"""What `noloco swarm` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bootstrap.traces.merge import FILE_NAME
from node.data.opening import DataPlan
from node.data.sources import DEFAULT_FIELD
from protocol.manifest import Manifest


@dataclass(frozen=True)
class LocalPlan:
    """`minutes` is the time that each node trains at most."""

    manifest: Manifest
    replicas: int
    directory: Path
    minutes: float
    validation_sequences: int
    summary: Path
    picture: Path | None = None
    trace: Path | None = None  # of all nodes
    data: tuple[str, ...] = ()  # as --data; none is the run's own
    text_field: str = DEFAULT_FIELD
    tokenizer: bytes | None = None  # the run's tokenizer.json
    from_checkpoint: str | None = None  # the first replicas' weights; a directory or a name on the hub
    checkpoint_minutes: float | None = None  # None is the node's own
    ends_by_clock: bool = False  # after `minutes` of all nodes together, whatever they are doing then

    @property
    def data_plan(self) -> DataPlan:
        """All nodes and the evaluation share one store of documents."""
        return DataPlan(self.data, self.text_field, self.directory / "documents")

    def names(self) -> dict[str, int]:
        """The stage of each node, by its name; a replica of every stage first, so that training can begin."""
        stages = range(self.manifest.stages)
        return {f"s{stage}r{replica}": stage for replica in range(self.replicas) for stage in stages}

    def arguments(self, name: str, address: str) -> list[str]:
        """Of the node's `noloco-node`, which joins at `address`."""
        stage, state = self.names()[name], self.directory / name
        arguments = [
            "--join", address, "--stage", str(stage), "--state-dir", str(state), "--host", "127.0.0.1", "--no-relay",
            "--threads", "1", "--device", "cpu",
        ]  # fmt: skip
        if stage == 0:
            arguments += self.data_plan.flags()
            if not self.ends_by_clock:  # the others end when the first stage has
                arguments += ["--max-minutes", str(self.minutes)]
        if self.from_checkpoint is not None:
            arguments += ["--from-checkpoint", self.from_checkpoint]
        if self.trace is not None:
            arguments += ["--trace", str(state / FILE_NAME)]
        if self.checkpoint_minutes is not None:
            arguments += ["--checkpoint-minutes", str(self.checkpoint_minutes)]
        return arguments
