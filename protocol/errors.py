"""Every error that this project raises on purpose.

`UserError` is for people: its text says what is wrong and what to do, and a command prints it alone and
exits with its code. The others are for programs: a caller catches them and goes on.
"""

from typing import TypeVar

# What a command's end says to whatever started it, as a table in docs/troubleshooting.md does
DONE = 0
NO = 1  # the answer of a command that was asked something; or it failed in a way that nobody meant
MEND = 2  # what was typed, this machine or a file: the same again ends the same
LATER = 75  # sysexits.h, EX_TEMPFAIL: the same again may do
INTERRUPTED = 130  # 128 and the signal's number, as a shell says it
TERMINATED = 143


class NolocoError(Exception):
    """Base of all errors raised on purpose."""


class UserError(NolocoError):
    """Something that the person at the keyboard can mend; the text ends with what to try."""

    exit_code = MEND


E = TypeVar("E", bound=UserError)


def later(error: E) -> E:
    """Mark what passes by itself: whatever has started the command may start it again."""
    error.exit_code = LATER
    return error


class MissingPackage(UserError):
    """A package that an extra of this one brings is not installed; the text ends with how to install it."""


class ManifestError(UserError):
    """A manifest that is malformed, impossible or not signed by its run's key."""


class DataError(UserError):
    """A dataset that is missing, unreadable or too short."""


class NothingHeldOut(DataError):
    """Text without a single sequence that nobody trains on; whoever catches it knows what its user can do."""


class TokenizerError(UserError):
    """A tokenizer that is missing, none, or not the run's."""


class CheckpointError(UserError):
    """A checkpoint to start a run from that is missing, damaged, or of a model that cannot be trained here."""


class ScenarioError(UserError):
    """Measured links, or what is asked of a plan for them, that cannot be used; the text names the place."""


class StateError(UserError):
    """A state directory that cannot be used: unreadable, of another run, or on a full disk."""


class LaterVersion(StateError):
    """What a later version of this program wrote or signed, which this one cannot read: it stays as it is."""


class ResourceError(UserError):
    """Too little memory or disk for the stage, or a port that is taken."""


class ClockError(UserError):
    """This machine's clock differs from its peers' by more than the DHT tolerates."""


class JoinError(UserError):
    """No peer could be reached, or the peers reached are not of the expected run."""


class TokenError(UserError):
    """A token that is none, is over, or is of another run; or none where the run asks for one."""


class WireError(NolocoError):
    """A peer broke the protocol: malformed, oversized, of an unknown version or kind. Counts against it."""


class UnknownField(WireError):
    """A request that says more than this version knows, and is right otherwise: a later one's, or nonsense."""


class CodecError(WireError):
    """A tensor whose bytes, shape or codec do not fit together."""


class RecordError(WireError):
    """A DHT record with a wrong schema, signature, key or lifetime."""


class PeerUnreachable(NolocoError):
    """The peer could not be dialled, or the stream to it broke. The request may or may not have arrived."""


class DeadlineExceeded(NolocoError):
    """No answer in time. The request may or may not have been carried out."""


def legible(text: str) -> str:
    """Make somebody else's text safe for a terminal: control characters but line ends and tabs become their codes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


MALFORMED = "malformed"  # the code of a refusal of what breaks the protocol


class Refused(NolocoError):
    """The peer answered with a refusal. `code` is for programs, the text for people; nothing was done."""

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(f"{code}: {reason}" if reason else code)
        self.code = code
        self.reason = reason


class Unreadable(Refused):
    """An answer at which this program failed in a way that nobody meant: a refusal, and against nobody."""

    CODE = "unreadable"

    def __init__(self, kind: str, failure: Exception) -> None:
        """Say what was asked, and the exception that reading its answer raised."""
        super().__init__(self.CODE, f"the answer to {kind} could not be read: {type(failure).__name__}")


class NonFinite(Refused):
    """A value, computed by this node, that is NaN, infinite, or beyond the codec in which it would travel."""

    def __init__(self, what: str, overflows: str = "") -> None:
        """Say `what` it is, as in "the loss"; `overflows` names the codec that cannot hold it, if it is finite."""
        super().__init__("non-finite", f"{what} of this stage cannot be used")
        self.what = what
        self.overflows = overflows


class OddLoss(Refused):
    """A microbatch whose loss is far above that of others: it does not count."""

    CODE = "odd-loss"

    def __init__(self, loss: float, most: float) -> None:
        """Say the loss, and the most with which it would have counted, in nats per token."""
        super().__init__(
            self.CODE, f"its loss of {loss:.3g} is far above those of others, {most:.3g} at most"
        )
        self.loss = loss


class OddGradient(Refused):
    """A gradient far too large to be one, by the fault of its peer or of the microbatch, which then does not count.

    Its code is that of an odd loss: nodes of earlier versions draw another microbatch for it, and blame nobody.
    """

    def __init__(self, norm: float) -> None:
        """Say the norm of the gradient."""
        super().__init__(OddLoss.CODE, f"a gradient for it has a norm of {norm:.3g}, out of all proportion")


class Unrepeatable(Refused):
    """What this node computed twice came out differently: its device or memory may be damaged."""

    def __init__(self, difference: float, usual: float) -> None:
        """Say the largest difference of two values, and the root mean square of all."""
        super().__init__("busy", "computed twice, it came out differently")
        self.difference = difference
        self.usual = usual


class OutOfMemory(Refused):
    """This machine's memory ran out in a piece of work, which has left nothing behind; another peer may do it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__("busy", reason or "out of memory")


class TransportDown(NolocoError):
    """The local transport is closed or restarting; nothing can be sent at present."""


class NodeFailed(NolocoError):
    """A part that this node cannot go on without has failed; the text says which, and what to do."""


class DeviceFailed(NodeFailed):
    """The device that computes has failed for good in this process: nothing in its memory can be read any more."""
