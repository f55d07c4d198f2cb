"""A device that counts what it is asked: launches, and waits for what they make, as a GPU has them, on the processor.

Tensors of `FAR` say that they are on another device and hold theirs on the host. Each operation on them is a launch,
but for views; whatever brings a value to the host, or needs one there, is a wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FAR = torch.device("meta")
# that bring a number home, or whose outputs' sizes depend on values
WAITING = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique",
    "aten.repeat_interleave.Tensor",
)


class FarTensor(torch.Tensor):
    """A tensor that says that it is on `FAR`."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> FarTensor:
        far: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=FAR
        )
        far.here = here
        return far

    def __repr__(self) -> str:  # type: ignore[override]
        return f"far {self.here!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of a far device")


class FarDevice(TorchDispatchMode):
    """Runs and counts. Mutable state: how often each operation was launched, and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = Counter[str]()
        self.waited = Counter[str]()
        self.uploaded = Counter[str]()

    @property
    def launches(self) -> int:
        return self.launched.total()

    @property
    def waits(self) -> int:
        return self.waited.total()

    def holding(self, here: torch.Tensor) -> torch.Tensor:
        """A tensor there with these values, which counts as nothing."""
        return FarTensor(here.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(func)
        flat = pytree.tree_leaves((args, kwargs))
        is_far = any(isinstance(each, FarTensor) for each in flat)
        asked = kwargs.get("device")
        if not is_far and (asked is None or torch.device(asked) != FAR):
            return func(*args, **kwargs)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        goes_home = asked is not None and torch.device(asked).type == "cpu"
        is_copy = name.startswith("aten.copy_")
        comes_home = goes_home or (is_copy and not _is_far(args[0]))
        if comes_home or name.startswith(WAITING) or _is_picked_by_values(name, args):
            self.waited[name] += 1
        elif (is_copy and not _is_far(args[1])) or (not is_far and name.startswith("aten._to_copy")):
            self.uploaded[name] += 1
        elif not func.is_view and not name.startswith(("aten.empty", "aten.new_empty", "aten.detach")):
            self.launched[name] += 1
        here_args, here_kwargs = pytree.tree_map_only(FarTensor, lambda far: far.here, (args, kwargs))
        if is_copy and not _is_far(args[0]):
            func(*here_args, **here_kwargs)
            return args[0]
        found = func(*here_args, **here_kwargs)
        if goes_home:
            return found
        given = {id(far.here): far for far in flat if isinstance(far, FarTensor)}
        return pytree.tree_map_only(
            torch.Tensor, lambda here: given.get(id(here)) if id(here) in given else FarTensor(here), found
        )


def _is_far(value: object) -> bool:
    return isinstance(value, FarTensor)


def _is_picked_by_values(name: str, args: Any) -> bool:
    if not name.startswith(("aten.index.", "aten.index_put")):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1])


@contextmanager
def far_device() -> Iterator[FarDevice]:
    """A device to compute on meanwhile; tensors with `device=FAR` are there."""
    with FarDevice() as device:
        yield device
