"""A stage's layers as compiled code, made before the node serves.

First one layer is compiled, whose code serves all layers of its kind: seconds. On a GPU with room for one microbatch
more the stage is then compiled whole. Each kind of inputs has code of its own, which is made when they come first and
run once, there and back, on zeros. What fails leaves the stage as it was.

Code is made inside `making_code` alone, for the shapes that this node chose, and never beside training: a kind takes
up to a minute, in which peers would wait, and while torch traces, it replaces how modules are called, in all threads.
Any other shape, such as a peer's shorter microbatch, runs uncompiled.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from node.model.head_loss import plain_softmax
from node.model.resources import free_caches, has_lost_device, is_out_of_memory
from node.model.stage import Stage, layer_outputs

T = TypeVar("T")
Body: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

NOT_COMPILED = "not-compiled"  # the event of a failure
MOST_KINDS = 4  # of inputs; torch keeps eight versions of one function


def nobody(sentence: str, event: str) -> None:
    """Tell nobody."""


def no_room() -> int:
    return 0


@dataclass(frozen=True)
class Compiling:
    """Choices of whoever trains the stage: `tell` gets a sentence and an event's name, from the compute thread.

    `whole_bytes` are what a microbatch takes at its peak: with so much `room` left to this node, in
    bytes, the stage is compiled whole.
    """

    tell: Callable[[str, str], None] = nobody
    whole_bytes: int = 0
    room: Callable[[], int] = no_room


@dataclass(frozen=True)
class Kind:
    """A kind of inputs, for which code is made."""

    shape: tuple[int, ...]
    learns: bool  # a graph is kept
    recomputes: bool
    is_bf16: bool


class CompiledBody:
    """The stage's body, compiled for the kinds of inputs that come inside `making_code`.

    Called by the compute thread.
    """

    def __init__(self, stage: Stage, compiling: Compiling) -> None:
        self._stage = stage
        self.compiling = compiling
        self._ready: dict[Kind, Body] = {}
        self._in_layers: dict[Kind, Body] = {}  # the same, by the code of single layers
        self._asked: set[Kind] = set()
        self._has_failed = False
        self._makes_code = False
        self._layers = torch.compile(layer_outputs, dynamic=False)
        self._softmax = torch.compile(plain_softmax, dynamic=False)
        self._ready_logits: set[torch.Size] = set()
        # torch's own tracer looks at what it warns of
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")

    @contextmanager
    def making_code(self) -> Iterator[None]:
        """Compile for the kinds of inputs that come meanwhile, which takes up to a minute each."""
        self._makes_code = True
        try:
            yield
        finally:
            self._makes_code = False

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        kind = Kind(
            tuple(inputs.shape),
            torch.is_grad_enabled(),
            self._stage.recomputes,
            torch.is_autocast_enabled(inputs.device.type),
        )
        self._ask(kind, inputs.device)
        code = None if self._has_failed else self._ready.get(kind)
        if code is None:
            return self._stage.body(inputs)
        return self._or_else(lambda: code(inputs), lambda: self._stage.body(inputs))

    def softmax(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `Softmax` of a chunk, compiled where that is ready.

        It is made of the work itself: another mode of gradients or autocast would have torch make it once more.
        """
        is_new = self._makes_code and logits.shape not in self._ready_logits
        if self._has_failed or (logits.shape not in self._ready_logits and not is_new):
            return plain_softmax(logits, labels)
        found = self._or_else(lambda: self._softmax(logits, labels), lambda: plain_softmax(logits, labels))
        self._ready_logits.add(logits.shape)
        return found

    def _or_else(self, compiled: Callable[[], T], plain: Callable[[], T]) -> T:
        try:
            if self._makes_code:
                return compiled()
            # whatever torch may guard against, nobody waits for code
            with torch.compiler.set_stance("eager_on_recompile"):
                return compiled()
        except Exception as error:
            if _is_no_compilers(error) or not (self._makes_code or isinstance(error, RuntimeError)):
                raise
            self._give_up(error)
            return plain()

    @property
    def is_ready(self) -> bool:
        """True if passes take compiled code."""
        return not self._has_failed and bool(self._ready)

    def _ask(self, kind: Kind, device: torch.device) -> None:
        if not self._makes_code or self._has_failed or kind in self._asked or len(self._asked) == MOST_KINDS:
            return
        self._asked.add(kind)
        try:
            self._make_layers(kind, device)
            if kind.learns and not kind.recomputes and self._has_room():
                self._make_whole(kind, device)
        except Exception as error:  # compilers fail in many ways, and training needs none
            if has_lost_device(error):
                raise
            if not is_out_of_memory(error):  # which leaves this kind as it is
                self._give_up(error)

    def _make_layers(self, kind: Kind, device: torch.device) -> None:
        def layers(inputs: torch.Tensor) -> torch.Tensor:
            return self._stage.body(inputs, run_layer=self._layers)

        began = time.monotonic()
        one_of_each = self._stage.layers_of_each_kind()
        self._try(kind, device, lambda inputs: self._stage.body(inputs, None, self._layers, one_of_each))
        self._ready[kind] = self._in_layers[kind] = layers
        self._tell("The layers", kind, began)

    def _make_whole(self, kind: Kind, device: torch.device) -> None:
        began = time.monotonic()
        whole = torch.compile(self._stage.body, dynamic=False)
        self._try(kind, device, whole)
        self._ready[kind] = whole
        self._tell("The stage", kind, began)

    def _try(self, kind: Kind, device: torch.device, body: Body) -> None:
        """Run forward and backward on zeros, in the modes of the pass that asks; no parameter gets a gradient."""
        is_first = self._stage.is_first
        inputs = torch.zeros(kind.shape, dtype=torch.long if is_first else torch.float32, device=device)
        if kind.learns and not is_first:
            inputs.requires_grad_()
        outputs = body(inputs)
        if kind.learns:
            some = next(self._stage.layers.parameters())
            torch.autograd.grad(outputs, [some], torch.ones_like(outputs))

    def _has_room(self) -> bool:
        """Return whether the stage may be compiled whole: by what this node may still take, caches given back."""
        free_caches()
        return self.compiling.whole_bytes < self.compiling.room()

    def drop_whole(self) -> None:
        """Compute with the code of single layers from now on: that of the whole stage took too much memory."""
        self._ready = dict(self._in_layers)

    def _tell(self, what: str, kind: Kind, began: float) -> None:
        seconds = time.monotonic() - began
        sentence = f"{what} compiled in {seconds:.0f} s, for {kind.shape[0]} sequences at a time."
        self.compiling.tell(sentence, "compiled")

    def _give_up(self, error: Exception) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        lines = str(error).strip().splitlines() or [type(error).__name__]
        self.compiling.tell(
            f"The stage could not be compiled ({lines[0][:200]}). It trains without, more slowly; --compile off "
            "keeps it from trying.",
            NOT_COMPILED,
        )


def _is_no_compilers(error: Exception) -> bool:
    """Return whether it is the device that failed, or its memory, with which uncompiled code fares no better."""
    return is_out_of_memory(error) or has_lost_device(error)
