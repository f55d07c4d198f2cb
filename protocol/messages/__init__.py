"""Messages: what one is, what it asks for, and how a handler sees and answers it.

A request names the class of traffic that it travels in, the type of its reply and who may ask it, so that neither a
caller nor a handler has to. Tensors travel beside a message, not in it (see `protocol.rpc.frames`). A field that is
missing or out of bounds is a `WireError` at the reader, before anything is done; an unknown one is so in a request,
and passes in an answer, which a later version may say more in. The requests and replies themselves are in
`protocol.messages.peers` and `protocol.messages.training`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, Unpack, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.codecs.codec import Encoded
from protocol.errors import UnknownField, WireError, legible
from protocol.ground import MOST_LOSS, Natural, PeerId
from protocol.messages.frame import Frame
from protocol.messages.layouts import Layout
from protocol.records.forgiving import otherwise
from protocol.version import PROTOCOL

KINDS = set[str]()  # of all messages that there are, each by its name on the wire
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=0, le=MOST_LOSS, allow_inf_nan=False)]  # nats per token
Id = Annotated[str, Field(min_length=1, max_length=64)]
OptionalId = Annotated[str, Field(max_length=64)]
ShortText = Annotated[str, Field(max_length=256)]


class Traffic(StrEnum):
    """The class of a message. Each has a stream of its own, so that a small message never waits behind bulk data."""

    CONTROL = "control"
    PIPELINE = "pipeline"
    PAIRING = "pairing"
    GOSSIP = "gossip"
    STATE = "state"

    @property
    def protocol(self) -> str:
        return f"/noloco/{PROTOCOL}/{self.value}"

    @property
    def is_work(self) -> bool:
        """True if answers take as long as computing does.

        Meanwhile it is told how far they are, and the handler is cancelled when its caller gives up.
        """
        return self is Traffic.PIPELINE


class Asker(StrEnum):
    """The peers that are answered; anybody else is refused as a "stranger". See `protocol.rpc.door`."""

    NEWCOMER = "newcomer"  # also who has shown nothing yet to a private run
    ANYBODY = "anybody"  # visitors, too, within an allowance; of a private run those that it has let in
    MEMBER = "member"  # who has a record of any stage
    REPLICA = "replica"  # of the stage that is asked
    BEFORE = "before"  # of the stage that sends its microbatches here


class Message(BaseModel):
    """Base of all messages. `kind` is a message's name on the wire."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "", **settings: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**settings)
        if kind:
            cls.kind = kind
            KINDS.add(kind)

    def told(self) -> dict[str, Any]:
        """The body as it travels: a field that has its default is left out, so that an earlier version, which may not
        know the field, reads whatever it could mean there.
        """
        return self.model_dump(exclude_defaults=True)

    @classmethod
    def parsed(cls, body: object) -> Self:
        """Validate an untrusted body.

        Raises `WireError` that names the kind and the first bad field: `UnknownField` where nothing else is wrong.
        No version names a field by anything but text, so such a key is malformed where unknown fields pass, too.
        """
        if isinstance(body, dict) and not all(isinstance(name, str) for name in body):
            raise WireError(f"malformed {cls.kind}: a field's name is not text")
        try:
            return cls.model_validate(body, strict=True)
        except ValidationError as error:
            problems = error.errors()
            first = problems[0]
            place = legible(".".join(str(part) for part in first["loc"])[:80])
            is_later = all(problem["type"] == "extra_forbidden" for problem in problems)
            kind = UnknownField if is_later else WireError
            raise kind(f"malformed {cls.kind}: {place}: {first['msg']}") from None


class Done(Message, kind="done"):
    """A plain acknowledgement."""


class Progress(Message, kind="progress"):
    """The progress of a request of the pipeline, told every second or two until it is answered.

    Silence then means that the peer is frozen or gone, and slow work is waited for. Not a request: it travels in a
    frame of its own type.
    """

    # onward: it waits for a later stage
    state: Annotated[
        Literal["receiving", "queued", "computing", "onward"],
        otherwise("computing", "receiving", "queued", "computing", "onward"),
    ]
    ahead: Natural = 0  # microbatches before it in the queue there
    done: Natural = 0  # grows whenever the request gets on, at a later stage too


RECEIVING = Progress(state="receiving")
M_co = TypeVar("M_co", bound=Message, covariant=True)
Reply_co = TypeVar("Reply_co", bound=Message, covariant=True)


class Status:
    """A request's progress. Mutable state: where to look; its handler sets that when it knows."""

    def __init__(self) -> None:
        self.look: Callable[[], Progress] = lambda: RECEIVING


@dataclass(frozen=True)
class Request(Generic[M_co]):
    """A checked request as its handler sees it."""

    peer: PeerId
    message: M_co
    frame: Frame
    status: Status = field(default_factory=Status)

    def tensors(self) -> list[torch.Tensor]:
        return self.frame.tensors()

    def encoded(self) -> list[Encoded]:
        return self.frame.encoded()


@dataclass(frozen=True)
class Answer(Generic[Reply_co]):
    """A reply with its tensors, already encoded for the wire."""

    message: Reply_co
    tensors: Sequence[Encoded] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of its bulk: of the tensors, and of fields that are bytes themselves."""
        fields = (value for _, value in self.message if isinstance(value, bytes))
        return sum(tensor.nbytes for tensor in self.tensors) + sum(map(len, fields))


@dataclass(frozen=True)
class Handler:
    """The handler of one kind of request, once `opened` has checked a frame's body. Raises `WireError` there."""

    kind: str
    traffic: Traffic
    asker: Asker
    opened: Callable[[PeerId, Frame, Status], Request[Any]]
    answer: Callable[[Request[Any]], Awaitable[Answer[Message]]]


class Asks(Message, Generic[Reply_co]):
    """Base of the requests that are answered by a `Reply_co`. `traffic` is the class whose stream it travels in."""

    model_config = ConfigDict(extra="forbid")
    traffic: ClassVar[Traffic]
    asker: ClassVar[Asker] = Asker.MEMBER
    _reply: ClassVar[type[Message]]

    def layouts(self, sent: Sequence[Encoded]) -> Sequence[Layout]:
        """The tensors that an answer has, if the request went with those that were `sent`."""
        return ()

    def require_fit(self, answer: Message, sent: Sequence[Encoded]) -> None:
        """Raise `WireError` where the values of an answer cannot be of this request with the tensors `sent`."""

    def __init_subclass__(
        cls,
        kind: str = "",
        traffic: Traffic | None = None,
        asker: Asker | None = None,
        **settings: Unpack[ConfigDict],
    ) -> None:
        super().__init_subclass__(kind, **settings)
        if traffic:
            cls.traffic = traffic
        if asker:
            cls.asker = asker

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if arguments := cls.__pydantic_generic_metadata__["args"]:  # `Asks[…]` itself, the base of a request
            cls._reply = arguments[0]

    @classmethod
    def reply(cls) -> type[Reply_co]:
        """The type of message that answers this one."""
        return cast("type[Reply_co]", cls._reply)

    @classmethod
    def answered_by(
        cls, handler: Callable[[Request[Self]], Awaitable[Answer[Reply_co]]], traffic: Traffic | None = None
    ) -> Handler:
        """`handler`, for `Rpc.handle`; it may raise `Refused`. `traffic`: another class than the message's own."""

        def opened(peer: PeerId, frame: Frame, status: Status) -> Request[Self]:
            return Request(peer, cls.parsed(frame.body), frame, status)

        return Handler(cls.kind, traffic or cls.traffic, cls.asker, opened, handler)
