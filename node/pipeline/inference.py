"""Losses and next tokens for whoever asks: forward passes with the slow weights along a route that the asker chose.

They stand behind training: a stage computes them only when no microbatch waits. For next tokens the keys and values
of earlier ones are kept between requests where they fit, so that one more token costs one token. They are a
convenience: whoever asks can start again at any time, and is told to when they are gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeAlias, TypeVar

import torch

from node.context import Context
from node.model.compute import Compute, Priority
from node.model.decoder import KeyValues
from node.model.replica import Replica
from node.model.stage_work import StageWork
from node.pipeline.incoming import IncomingTensors
from protocol.codecs.codec import Encoded, encode
from protocol.errors import Refused, WireError
from protocol.ground import PeerId
from protocol.messages import Asks
from protocol.messages.training import Evaluate, Evaluated, Predict, Predicted
from protocol.rpc.patience import Patience
from protocol.rpc.rpc import Answer, Reply, Request, Rpc

P = ParamSpec("P")
T = TypeVar("T")

ONWARD_DEADLINE = 60.0  # of silence: it may wait long behind the training of a slow stage
ONWARD_STANDSTILL = 300.0  # and not for ever, whatever the later stage says
ONWARD_MOST = 600.0  # in all
# of all keys and values kept: six layers of width 768 hold three answers of 1,024 tokens
MOST_BYTES = 128 << 20
FORGOTTEN_AFTER = 60.0  # seconds in which the next token was not asked for
SHARE = 0.1  # of the compute thread's time while the stage trains,
AT_ONCE = 10.0  # so many seconds at once
IDLE_SECONDS = 5.0  # without training: then they get all of it

Key: TypeAlias = tuple[PeerId, str]  # who asks, for which answer


@dataclass(frozen=True)
class Memory:
    """Keys and values of the first `tokens` of an answer, by the weights of `round`."""

    cache: KeyValues
    tokens: int
    round: int
    nbytes: int


class Memories:
    """Keeps the key-value caches of answers that are being generated, within a bound.

    It lives on the event loop, and who works with a memory takes it out: two requests never share one.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, seconds: float = FORGOTTEN_AFTER) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._kept: OrderedDict[Key, tuple[float, Memory]] = OrderedDict()  # since when, what
        self._timer: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for _, memory in self._kept.values())

    def take(self, key: Key, position: int) -> Memory | None:
        """Take what is kept for the answer; None at its start. Raises `Refused` unless it is `position` tokens."""
        _, memory = self._kept.pop(key, (0.0, None))
        if not position:
            return None
        if memory is None or memory.tokens != position:
            raise Refused("forgotten", "start again with all tokens")
        return memory

    def keep(self, key: Key, memory: Memory) -> None:
        """Make room by dropping the longest unused; one that is larger than all room is not kept."""
        if memory.nbytes > self._most_bytes:
            return
        while self.nbytes + memory.nbytes > self._most_bytes:
            self._kept.popitem(last=False)
        self._kept[key] = (asyncio.get_running_loop().time(), memory)
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the memory that will be forgotten first."""
        if self._timer is None and self._kept:
            soonest = min(since for since, _ in self._kept.values()) + self._seconds
            self._timer = asyncio.get_running_loop().call_at(soonest, self._expire)

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for key in [key for key, (since, _) in self._kept.items() if since + self._seconds <= now]:
            del self._kept[key]
        self._timer = None
        self._set_timer()


class Leftover:
    """The compute thread for work that stands behind training, one piece at a time, within a share.

    Work waits while its share is used up.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._clock = asyncio.get_running_loop().time
        self._turn = asyncio.Lock()
        self._paid = self._trained = float("-inf")
        self._pieces = 0  # of training work, seen so far

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work as `Compute.run` does, when there is time for it."""
        async with self._turn:
            await self._afford()
            before = self._compute.serving.seconds()
            try:
                return await self._compute.run(Priority.SERVE, work, *args, **kwargs)
            finally:
                spent = self._compute.serving.seconds() - before
                self._paid = max(self._paid, self._clock()) + spent / SHARE

    async def _afford(self) -> None:
        while self._is_training():
            early = self._paid - AT_ONCE / SHARE - self._clock()
            if early <= 0:
                return
            await asyncio.sleep(min(1.0, early))

    def _is_training(self) -> bool:
        if self._compute.finished != self._pieces:
            self._pieces, self._trained = self._compute.finished, self._clock()
        return self._clock() - self._trained < IDLE_SECONDS


class Inference:
    """Computes losses and next tokens by the slow weights."""

    def __init__(self, context: Context, replica: Replica, work: StageWork) -> None:
        self._context = context
        self._replica = replica
        self._work = work
        self._incoming = IncomingTensors(context.manifest, replica.stage, work.transfer)
        self._leftover = Leftover(context.compute)
        self._memories = Memories()
        manifest = context.manifest
        # beyond the model's own length each token turns those before it anew
        is_dynamic = manifest.model.rope.type == "dynamic"
        self._remembers = not is_dynamic or manifest.data.sequence_tokens <= manifest.positions

    def serve(self, rpc: Rpc) -> None:
        rpc.handle(Evaluate.answered_by(self.on_evaluate), Predict.answered_by(self.on_predict))

    async def on_evaluate(self, request: Request[Evaluate]) -> Answer[Evaluated]:
        """Loss of the slow weights on a microbatch, along the route that the caller chose."""
        self._require_weights()
        context, message = self._context, request.message
        if context.is_last or _comes_back(context, message):
            loss_sum, tokens = await self._leftover.run(self._evaluate_last, request)
            return Answer(Evaluated(loss_sum=loss_sum, tokens=tokens))
        parcel = await self._leftover.run(self._evaluate, request)
        return Answer((await _onward(context, message, message.stage, message.route, parcel))[0])

    async def on_predict(self, request: Request[Predict]) -> Answer[Predicted]:
        """Logits of the slow weights after the last token, along the route that the caller chose."""
        self._require_weights()
        context, message = self._context, request.message
        if _comes_back(context, message):
            logits, round_ = await self._leftover.run(self._head, request)
            return _answer([round_], logits)
        key = (request.peer, message.answer)
        before = self._memories.take(key, message.position)
        outputs, memory = await self._leftover.run(self._advance, request, before)
        if self._remembers:
            self._memories.keep(key, memory)
        if context.is_last:
            return _answer([memory.round], outputs)
        parcel = [encode(outputs[0], "fp32")]
        predicted, tensors = await _onward(context, message, message.stage, message.route, parcel)
        if len(predicted.rounds) != len(message.route):
            raise Refused("failed", f"stage {message.stage + 1} tells the rounds of other stages")
        return _answer([memory.round, *predicted.rounds], tensors)

    def _require_weights(self) -> None:
        if self._replica.is_blank:
            raise Refused("not-serving", "this replica has no weights yet")

    # --- on the compute thread ----------------------------------------------------------------

    def _evaluate_last(self, request: Request[Evaluate]) -> tuple[float, int]:
        is_back = _comes_back(self._context, request.message)
        return self._work.evaluate_last(*self._incoming.read(request, is_back, may_be_short=True), is_back)

    def _evaluate(self, request: Request[Evaluate]) -> list[Encoded]:
        return self._work.evaluate(*self._incoming.read(request, may_be_short=True))

    def _advance(self, request: Request[Predict], memory: Memory | None) -> tuple[list[torch.Tensor], Memory]:
        """The outputs over the new tokens, on the last stage the logits; and what to keep for the next token."""
        inputs, replica = self._decoded(request), self._replica
        if memory is not None and memory.round != replica.round:
            raise Refused("forgotten", "a round has ended: the weights are others now")
        cache = KeyValues() if memory is None else memory.cache
        outputs = replica.passes.evaluate(inputs, cache=cache).cpu()
        tokens = request.message.position + inputs.shape[1]
        kept = Memory(cache, tokens, replica.round, cache.nbytes)
        if not self._context.is_last:
            return [outputs], kept
        return _largest(outputs[0, -1].float(), request.message.top), kept

    def _head(self, request: Request[Predict]) -> tuple[list[torch.Tensor], int]:
        """First stage of a ring: logits of the activations that come back from the last one."""
        outputs = self._replica.passes.evaluate(self._decoded(request, is_back=True), is_back=True).cpu()
        return _largest(outputs[0, -1].float(), request.message.top), self._replica.round

    def _decoded(self, request: Request[Predict], is_back: bool = False) -> torch.Tensor:
        """The checked inputs. Raises `Refused` for what does not fit this stage."""
        manifest, is_first = self._context.manifest, self._replica.stage.is_first and not is_back
        tensors, position = request.tensors(), request.message.position
        expected = "one sequence that fits the run's length is expected, one token of it when it goes on"
        if len(tensors) != 1 or tensors[0].dim() != (2 if is_first else 3) or tensors[0].shape[0] != 1:
            raise Refused("bad-shape", expected)
        inputs, tokens = tensors[0], tensors[0].shape[1]
        if not 1 <= tokens <= (1 if position else manifest.data.sequence_tokens) or (
            position + tokens > manifest.data.sequence_tokens
        ):
            raise Refused("bad-shape", expected)
        if is_first:
            if inputs.is_floating_point() or not 0 <= int(inputs.min()) <= int(inputs.max()) < (
                manifest.model.vocab_size
            ):
                raise Refused("bad-shape", "tokens are outside the vocabulary")
            return inputs.long()
        if inputs.shape[2] != manifest.model.hidden_size or not inputs.is_floating_point():
            raise Refused("bad-shape", expected)
        if not bool(torch.isfinite(inputs).all()):
            raise Refused("non-finite", "the activations hold NaN or infinity")
        return inputs.float()


def _largest(logits: torch.Tensor, top: int) -> list[torch.Tensor]:
    """All logits [vocabulary], or the `top` largest ones and their tokens, each [top]."""
    if not 0 < top < logits.numel():
        return [logits]
    if top == 1:  # the first of equal ones, as greedy decoding anywhere
        token = torch.argmax(logits, keepdim=True)
        return [logits[token], token.to(torch.int32)]
    values, tokens = torch.topk(logits, top)
    return [values, tokens.to(torch.int32)]


def _answer(rounds: list[int], tensors: list[torch.Tensor]) -> Answer[Predicted]:
    encoded = [encode(t, "fp32" if t.is_floating_point() else "int32") for t in tensors]
    return Answer(Predicted(rounds=rounds), encoded)


# --- the route ------------------------------------------------------------------------------------


def _comes_back(context: Context, message: Evaluate | Predict) -> bool:
    """Return whether the request comes back to the first stage of a ring. Raises `Refused` for another stage's."""
    manifest = context.manifest
    is_back = manifest.is_ring and context.stage == 0 and message.stage == manifest.stages
    is_ours = is_back or message.stage == context.stage
    if not is_ours or len(message.route) != manifest.hops - 1 - message.stage:
        raise Refused("not-serving", "the route does not fit this stage")
    return is_back


async def _onward(
    context: Context, message: Asks[Reply], stage: int, route: list[str], parcel: list[Encoded]
) -> tuple[Reply, list[torch.Tensor]]:
    """Ask the next stage of the route. Raises `Refused` when its answer is nonsense, else as `Rpc.call`."""
    onward = message.model_copy(update={"stage": stage + 1, "route": route[1:]})
    patience = Patience(ONWARD_DEADLINE, ONWARD_STANDSTILL, most=ONWARD_MOST)
    try:
        return await context.rpc.call(PeerId(route[0]), onward, parcel, deadline=patience)
    except WireError as failure:  # of the next stage, not of the one who asks
        raise Refused("failed", f"stage {stage + 1} answered nonsense") from failure
