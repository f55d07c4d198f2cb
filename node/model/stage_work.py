"""What the compute thread does with one microbatch: decode and check, compute, encode."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import torch

from node.model.passes import Learned, Passes
from node.model.resources import is_out_of_memory, named, retried
from node.model.sparing import Sparing
from protocol.codec import (
    FLOATING,
    Encoded,
    as_read,
    bytes_as_tensor,
    encode,
    require_finite_values,
    torch_type,
)
from protocol.device_codec import NotSendable, decoded_there, packed, unpacked
from protocol.errors import CodecError, NonFinite, Refused
from protocol.manifest import Manifest
from protocol.messages import Message
from protocol.rpc import Request

T = TypeVar("T")
U = TypeVar("U")
Load: TypeAlias = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # gives (inputs, labels)
LossAndAnswer: TypeAlias = tuple[float, list[Encoded]]  # the loss, and the gradient for the stage before

AHEAD = 2  # pieces of work launched and not finished: one runs, one waits, and a more urgent one need not wait long


class StageWork:
    """Holds no state of its own: backward passes alone change something, the stage's gradients.

    What goes to peers is a `PendingResult`: on a GPU it is copied and encoded while the next microbatch is computed.
    """

    def __init__(
        self, manifest: Manifest, passes: Passes, copies: DeviceTransfer, sparing: Sparing | None = None
    ) -> None:
        """Without `sparing` memory that runs out is the caller's to see, as in a rehearsal."""
        self._sparing = sparing
        self._manifest = manifest
        self._passes = passes
        self._copies = copies

    def decoded(
        self, request: Request[Message], is_back: bool = False, may_be_short: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) of a request, checked. Raises `Refused` for what does not fit this stage.

        With `is_back` they come from the last stage, in a ring. Sequences have the run's length; with `may_be_short`
        at most that.
        """
        try:
            inputs, encoded_labels = request.encoded()
        except ValueError:
            raise Refused("bad-shape", "two tensors are expected: inputs and labels") from None
        labels = as_read(encoded_labels)
        model, data = self._manifest.model, self._manifest.data
        tokens = data.sequence_tokens
        if may_be_short and labels.dim() == 2 and labels.numel():
            tokens = min(tokens, labels.shape[1])
        shape = (labels.shape[0] if labels.dim() else 0, tokens)
        are_tokens = self._passes.stage.is_first and not is_back
        expected = shape if are_tokens else (*shape, model.hidden_size)
        if not 0 < shape[0] <= self._manifest.inner.sequences:  # more would take memory that is not there
            raise Refused("bad-shape", f"expected at most {self._manifest.inner.sequences} sequences")
        if tuple(labels.shape) != shape or tuple(inputs.shape) != expected:
            raise Refused("bad-shape", f"expected inputs of shape {expected}")
        tokens_in = as_read(inputs) if are_tokens else labels
        for ids in (labels, tokens_in):
            if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
                raise Refused("bad-shape", "tokens are outside the vocabulary")
        return tokens_in if are_tokens else self._activations(inputs), labels.long()

    def _activations(self, encoded: Encoded) -> torch.Tensor:
        """Activations as float32, on a GPU made of their bytes there. Raises `Refused` for NaN and infinity.

        That is looked for here, in scales where the codec has some: to ask the GPU would be to wait for it.
        """
        try:
            require_finite_values(encoded)
        except CodecError:
            raise Refused("non-finite", "the activations hold NaN or infinity") from None
        return self._received(encoded)

    def _received(self, encoded: Encoded) -> torch.Tensor:
        """What a peer sent, as it is read."""
        if not self._copies.encodes_there or encoded.codec not in FLOATING:
            return as_read(encoded).float()
        there = self._copies.to_device(bytes_as_tensor(encoded))
        return decoded_there(encoded.codec, encoded.shape, there)

    def forward(self, load: Load) -> tuple[torch.Tensor, torch.Tensor, PendingResult[list[Encoded]]]:
        inputs, labels = load()
        leaf, outputs = self._forward(inputs)
        codec = self._manifest.wire.activations
        fetch = self._outgoing(outputs, codec, "activations")
        self._copies.keep_pace()
        if not outputs.requires_grad:  # in slices nothing of them is needed any more
            outputs = outputs.new_empty(0)
        return leaf, outputs, self._copies.landing(lambda: [fetch(), _labels(labels)])

    def backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> PendingResult[list[Encoded]]:
        by_inputs = self._backward(leaf, outputs, gradient)
        answer = self._answer(by_inputs)
        self._copies.keep_pace()
        return self._copies.landing(answer)

    def last_stage(self, load: Load) -> PendingResult[LossAndAnswer]:
        """Forward and backward. Raises `NonFinite` for a loss that is not finite, whose gradients are not added."""
        return self._learn(load, self._passes.last_stage)

    def head(self, load: Load, learns: bool) -> PendingResult[LossAndAnswer]:
        """Like `last_stage`, in a ring at the first stage."""
        return self._learn(load, partial(self._passes.head, learns=learns))

    def _learn(
        self, load: Load, learn: Callable[[torch.Tensor, torch.Tensor], Learned]
    ) -> PendingResult[LossAndAnswer]:
        inputs, labels = (self._copies.to_device(tensor) for tensor in load())

        def work() -> Learned:
            return learn(inputs, labels)

        loss, by_inputs = work() if self._sparing is None else self._sparing.run(work)
        answer, fetch_loss = self._answer(by_inputs), self._to_host(loss)
        self._copies.keep_pace()
        return self._copies.landing(lambda: (_finite(fetch_loss().item()), answer()))

    def _forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def work() -> tuple[torch.Tensor, torch.Tensor]:
            return self._passes.forward(self._copies.to_device(inputs))

        if self._sparing is None:
            return work()
        leaf, outputs = self._sparing.run(work, keeps_graph=True)
        if outputs.requires_grad:
            self._sparing.holds(outputs)
        return leaf, outputs

    def _backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        def work() -> torch.Tensor | None:
            return self._passes.backward(leaf, outputs, self._copies.to_device(gradient))

        if self._sparing is None:
            return work()
        return self._sparing.backward(work, lambda: self._passes.backward_again(leaf, gradient))

    def evaluate(self, load: Load) -> list[Encoded]:
        inputs, labels = load()
        return [_encoded(self._passes.evaluate(inputs).cpu(), "fp32", "activations"), _labels(labels)]

    def evaluate_last(self, load: Load, is_back: bool = False) -> tuple[float, int]:
        inputs, labels = load()
        return self._passes.evaluate_loss(inputs, labels, is_back), labels.numel()

    def _to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """What was computed is not lost for want of memory: then it comes as it is, and at once."""
        try:
            return retried(lambda: self._copies.to_host(tensor, dtype))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        copy = tensor.detach().cpu()
        return lambda: copy

    def _outgoing(self, tensor: torch.Tensor, codec: str, what: str) -> Callable[[], Encoded]:
        """What to call for it in a peer's bytes, which a GPU makes itself where it has memory for them."""
        if self._copies.encodes_there:
            try:
                raw = retried(lambda: self._copies.to_host(packed(tensor, codec).raw))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return lambda: _arrived(codec, tensor.shape, raw(), what)
        fetch = self._to_host(tensor, torch_type(codec))
        return lambda: _encoded(fetch(), codec, what)

    def _answer(self, by_inputs: torch.Tensor | None) -> Callable[[], list[Encoded]]:
        """What to call for the gradient that the stage before gets; the first stage has none."""
        if by_inputs is None:
            return list
        codec = self._manifest.wire.gradients
        fetch = self._outgoing(by_inputs, codec, "gradients")
        return lambda: [fetch()]


def _finite(loss: float) -> float:
    """Raises `NonFinite`: the microbatch counts, and its sender must not learn from it."""
    if not math.isfinite(loss):
        raise NonFinite("the loss")
    return loss


def _labels(labels: torch.Tensor) -> Encoded:
    return encode(labels.to(torch.int32), "int32")


def _arrived(codec: str, shape: Sequence[int], raw: torch.Tensor, what: str) -> Encoded:
    """Like `_encoded`, of what a device has encoded."""
    try:
        return unpacked(codec, shape, raw)
    except NotSendable as refusal:
        overflows = "" if refusal.is_nan or codec in ("fp32", "bf16") else codec
        raise NonFinite(f"the {what}", overflows) from None


def _encoded(tensor: torch.Tensor, codec: str, what: str) -> Encoded:
    """For a peer. Raises `NonFinite` for what it would refuse: this node finds that out itself."""
    try:
        encoded = encode(tensor, codec)
        require_finite_values(encoded)
    except CodecError:
        overflows = "" if bool(tensor.isnan().any()) or codec in ("fp32", "bf16") else codec
        raise NonFinite(f"the {what}", overflows) from None
    return encoded


# --- between the host and the device --------------------------------------------------------------


class PendingResult(Generic[T]):
    """A result that is there, or will be when `fetch` returns."""

    def __init__(self, fetch: Callable[[], T], at_once: bool) -> None:
        """`fetch` waits for the result. Whoever calls it gets what it raises; with `at_once`, whoever makes this."""
        self._is_there = at_once
        self.fetch = _constant(fetch()) if at_once else fetch

    def then(self, use: Callable[[T], U]) -> PendingResult[U]:
        """What `use` makes of it."""
        return PendingResult(lambda: use(self.fetch()), at_once=self._is_there)

    async def landed(self) -> T:
        """What `fetch` returns. Waits in a thread. Raises what it raises, `OutOfMemory` for any way to say that."""
        if self._is_there:
            return self.fetch()
        try:
            return await asyncio.to_thread(retried, self.fetch)
        except (MemoryError, RuntimeError) as error:
            raise named(error) from None


def _constant(result: T) -> Callable[[], T]:
    return lambda: result


class DeviceTransfer:
    """The two ways of one device. Called by the device's compute thread alone.

    Here the host is the device, or one without streams: everything is there at once.
    """

    encodes_there = False  # whether tensors go up and down in the codecs' bytes

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy values to the device, for work launched from now on."""
        return host.to(self._device)

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """Begin to copy what the work launched so far makes of `tensor`; the function waits and returns it."""
        copy = tensor.detach().to("cpu", dtype)
        return lambda: copy

    def landing(self, fetch: Callable[[], T]) -> PendingResult[T]:
        """What `fetch` will make of copies that were begun."""
        return PendingResult(fetch, at_once=True)

    def keep_pace(self) -> None:
        """After a piece of work: wait until at most `AHEAD` are unfinished. Here it is finished when it returns."""


class CudaTransfer(DeviceTransfer):
    """Both ways are hidden behind what the GPU computes: kernels are only launched, each way has a stream and pinned
    memory of its own, and whoever wants a result waits for it outside the compute thread, which launches the next
    piece of work meanwhile.

    What is sent and received goes over PCIe in the codecs' bytes; torch keeps the pinned memory for the next ones.

    Mutable state: a stream each way, and the ends of the pieces of work that were launched last.
    """

    encodes_there = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends: deque[torch.cuda.Event] = deque()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        if host.device.type != "cpu":  # it was made there of received bytes
            return host
        pinned = host.contiguous().pin_memory()  # the allocator keeps it until the copy has been made
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._up)
        tensor.record_stream(computing)
        return tensor

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        made = tensor.detach().to(dtype or tensor.dtype).contiguous()
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            host.copy_(made, non_blocking=True)
            arrived.record(self._down)
        made.record_stream(self._down)

        def fetch() -> torch.Tensor:
            arrived.synchronize()
            return host

        return fetch

    def landing(self, fetch: Callable[[], T]) -> PendingResult[T]:
        return PendingResult(fetch, at_once=False)

    def keep_pace(self) -> None:
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()


def copies_of(device: torch.device) -> DeviceTransfer:
    return CudaTransfer(device) if device.type == "cuda" else DeviceTransfer(device)
