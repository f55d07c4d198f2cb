"""Screens the gradients of next-stage peers, and reports problems of this node's stage.

Each node keeps its own record of the next stage's peers and believes nobody else's. A gradient out of all proportion
to those that the same stage gave before is worthless, finite as it is: clipped to its norm, the others of its batch
vanish.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, median_low

import torch

from node.context import Context
from node.membership.view import Member
from node.model.inner import LARGEST_NORM
from node.model.replica import Replica
from protocol.access.peer_limits import PeerTable
from protocol.codecs.codec import Encoded
from protocol.errors import CodecError, NonFinite, OddGradient, Unrepeatable
from protocol.ground import PeerId

CONTENT = frozenset(
    {"non-finite", "bad-shape", "odd-loss"}
)  # refusals for what a microbatch holds: no other time helps
HISTORY = 64
ENOUGH = 5  # gradients before one is judged
PROPORTION = 1_000.0  # times the median; honest norms of a run differ by less than a tenth of it
SAMPLE, SAMPLED_POSITIONS = (
    256,
    16,
)  # entries of a gradient, and of so many positions, by which two are compared
SAMPLES = 4  # of a peer's last answers, and of as many peers:
SAMPLED_PEERS = 256
SAME = 0.95  # cosine of two answers that are the same, with some noise
UNLIKE = 0.5  # where most of a stage's successive answers are as alike as that, nothing is told by it
USUAL = 2.0  # times the median, what counts of one; honest norms of one time are within 1.3 of each other
TOO_SLOW = 4.0  # times as long as the stage before takes; with less, a replica more or a move mends it


class Norms:
    """The usual norm of recent gradients, and what is far beyond it.

    The median holds while fewer than half of the last `HISTORY` norms lie. What is out of proportion enters as the
    most that is not, so that a scale that has changed for good is accepted after half a history.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def kept(self, norm: float) -> float:
        """The part that counts of a gradient with this norm, finite; 0 for one out of proportion. Remembers it."""
        usual = median(self._norms) if len(self._norms) >= ENOUGH else 0.0
        self._norms.append(min(norm, PROPORTION * usual) if usual else norm)
        if not usual or norm <= USUAL * usual:
            return 1.0
        return USUAL * usual / norm if norm <= PROPORTION * usual else 0.0


class Repeats:
    """Knows the last answers of each peer by a sample, and which of them are the same again.

    Honest answers to different texts point in different directions; of the same text, sent again after something
    failed, they are the same. Mutable state: samples of the last answers with the text of each, and how alike two
    successive ones of a peer lately were.
    """

    def __init__(self) -> None:
        self._samples = PeerTable[deque[tuple[bytes, torch.Tensor]]](SAMPLED_PEERS)
        self._likeness: deque[float] = deque(maxlen=HISTORY)

    def is_repeated(self, peer: PeerId, text: bytes, gradient: torch.Tensor) -> bool:
        """Return whether the peer gave the same for another text, but for its length and some noise. Remembers it.

        `text` tells texts apart, such as a digest of the labels.
        """
        sample = _sample(gradient)
        if sample is None:
            return False
        known = self._samples.get(peer) or deque(maxlen=SAMPLES)
        others = [other for known_text, other in known if known_text != text]
        likeness = max((float(torch.dot(sample, other)) for other in others), default=0.0)
        known.append((text, sample))
        self._samples[peer] = known
        self._likeness.append(likeness)
        return likeness > SAME and median(self._likeness) < UNLIKE


def _sample(gradient: torch.Tensor) -> torch.Tensor | None:
    """Draw entries of some positions, each position scaled to the same norm; a unit vector, None of zeros alone.

    One position may have nearly all of the gradient's norm, as one whose activation is small does behind an RMSNorm:
    then any two gradients with such a position would be alike.
    """
    positions = gradient.reshape(-1, gradient.shape[-1]) if gradient.ndim else gradient.reshape(1, 1)
    entries = max(1, SAMPLE // SAMPLED_POSITIONS)
    chosen = positions[
        :: max(1, len(positions) // SAMPLED_POSITIONS), :: max(1, positions.shape[1] // entries)
    ]
    chosen = chosen.float().cpu()
    norms = torch.linalg.vector_norm(chosen, dim=1, keepdim=True)
    count = int(torch.count_nonzero(norms))
    return (
        (chosen / norms.clamp_min(torch.finfo(torch.float32).tiny)).flatten() / math.sqrt(count)
        if count
        else None
    )


class GradientScreen:
    """Screens the gradients that next-stage peers return.

    Mutable state: the norms of the last ones, and samples of the last ones of each peer.
    """

    def __init__(self) -> None:
        self._norms = Norms()
        self._repeats = Repeats()

    def checked(self, peer: PeerId, labels: Encoded, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that the peer gave for the text with these labels, or shortened to `USUAL` earlier ones.

        Raises `CodecError` for one that is not finite or what the peer gave for another text, and `OddGradient`
        for one that is far out of proportion to them.
        """
        kept = self._in_proportion(gradient)
        text = hashlib.blake2b(b"".join(labels.buffers), digest_size=16).digest()
        if self._repeats.is_repeated(peer, text, gradient):
            raise CodecError("the gradient is that of another microbatch")
        return kept

    def _in_proportion(self, gradient: torch.Tensor) -> torch.Tensor:
        norm = norm_of(gradient)
        if not math.isfinite(norm):
            raise CodecError("the gradient is not finite")
        kept = self._norms.kept(norm) if norm <= LARGEST_NORM else 0.0
        if not kept:
            raise OddGradient(norm)
        return gradient if kept == 1.0 else kept * gradient


def norm_of(gradient: torch.Tensor) -> float:
    """‖gradient‖; NaN or infinite where it has such values. The event loop waits for it.

    Of bf16 by its product with itself, which is right to half a percent: 1 ms for 12 MB, where torch's norm takes 13.
    """
    flat = gradient.reshape(-1)
    if flat.dtype == torch.bfloat16:
        return math.sqrt(torch.dot(flat, flat).item())
    return float(torch.linalg.vector_norm(flat.float()))


class StageDiagnostics:
    """Reports to the volunteer what is wrong here: each problem once, and not with every microbatch."""

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._told: set[str] = set()

    def note(self, error: NonFinite) -> None:
        """Note a microbatch that was given up for what became of it here."""
        event = "overflow" if error.overflows else "non-finite"
        if f"{event} {error.what}" in self._told:
            return
        self._told.add(f"{event} {error.what}")
        stage = self._context.stage
        if error.overflows:
            self._context.events.warn(
                f"{error.what.capitalize()} of stage {stage} are too large for {error.overflows}, in which they "
                "travel; such microbatches are dropped. If it goes on, the run's founder has to found it again with "
                f'wire.{error.what.removeprefix("the ")} = "bf16".',
                event,
                stage=stage,
                what=error.what,
                codec=error.overflows,
            )
            return
        sound = bool(torch.isfinite(self._replica.flat.values).all())
        reason = (
            "the microbatch or this device may be damaged"
            if sound
            else "this replica's weights are not finite"
        )
        self._context.events.warn(
            f"Stage {stage} here computed NaN or infinity in {error.what}: {reason}. Such microbatches "
            "are dropped. If it goes on, stop this node, remove its checkpoint and start it again.",
            event,
            stage=stage,
            what=error.what,
            weights_are_finite=sound,
        )

    def note_unrepeatable(self, error: Unrepeatable) -> None:
        """Tell that this machine computes the same differently from one time to the next; each time by an event."""
        self._context.events.emit("unrepeatable", difference=error.difference, usual=error.usual)
        if "unrepeatable" in self._told:
            return
        self._told.add("unrepeatable")
        self._context.events.warn(
            "This machine computed a microbatch twice and found different numbers: its device or its memory may be "
            "damaged or overclocked. It was not used. Stop this node and test the memory before it goes on.",
            "damaged-machine",
            difference=error.difference,
            usual=error.usual,
        )

    def note_step(self) -> None:
        """Check after each inner step whether this stage keeps up with the one before it."""
        context, now = self._context, self._context.transport.now()
        if context.stage == 0 or "too slow" in self._told:
            return
        stage, before = (context.view.members(s, now) for s in (context.stage, context.stage - 1))
        found = lag(context.throughput.capacity(context.compute.duty.share), stage, before)
        if found is None or not found.is_too_slow:
            return
        self._told.add("too slow")
        context.events.warn(
            f"Stage {context.stage} takes {found.here:.2g} s a microbatch here and {found.stage:.2g} s with all its "
            f"replicas; the stage before produces one every {found.before:.2g} s. The run goes at the pace of this "
            "stage: a faster device, more replicas of it or fewer layers in it would help.",
            "stage-too-slow",
            stage=context.stage,
            seconds_here=round(found.here, 6),
            seconds=round(found.stage, 6),
            seconds_before=round(found.before, 6),
        )


@dataclass(frozen=True)
class Lag:
    """Seconds for a microbatch, all replicas of a stage together, and of this replica alone."""

    here: float
    stage: float
    before: float

    @property
    def is_too_slow(self) -> bool:
        return self.stage > TOO_SLOW * self.before


def lag(own: float | None, stage: Iterable[Member], before: Iterable[Member]) -> Lag | None:
    """Compare the speed of this stage with the one before it; None while too little is known.

    `own` is this replica's capacity in microbatches per second. Each replica of a stage counts as its median one (of
    two, the slower): a record that claims any speed then changes nothing.
    """
    ours, theirs = (
        [member.announcement.capacity for member in members if member.announcement.state == "serving"]
        for members in (stage, before)
    )
    if not own or not ours or not theirs or not all([*ours, *theirs]):
        return None
    seconds = (
        1 / (len(claims) * median_low(claim for claim in claims if claim)) for claims in (ours, theirs)
    )
    return Lag(1 / own, *seconds)
