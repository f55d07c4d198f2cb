"""Weights of a Hugging Face checkpoint: a local directory or a repository of the hub, safetensors only.

A stage reads only its own tensors, and of the hub only the files that hold them. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from node.machine.home import at_home
from node.machine.named import is_folder, is_there, require_checkpoint_name, require_text_name
from node.machine.pointers import POINTER_BYTES, pointer_in
from node.model.checkpoint_kinds import (
    ADAPTER,
    CONFIG,
    INDEX,
    UNFINISHED,
    WHOLE,
    instead_of,
)
from node.model.flat import layout
from node.model.replica import Replica
from node.model.stage import parameter_shapes
from node.storage.stage_state import LARGEST
from protocol.errors import CheckpointError
from protocol.run.manifest import Manifest

TEMPLATES = "additional_chat_templates"
MAX_CONFIG_BYTES = 2**20
MAX_INDEX_BYTES = 2**26  # a thousand layers have less
MAX_TOKENIZER_CONFIG_BYTES = 2**24  # Gemma's, which lists six thousand tokens, has 2**20
FLOATS = ("F64", "F32", "F16", "BF16")
# the settings of config.json that make the shapes of a tensor, by what is in its name
MADE_BY = {
    "embed_tokens": "vocab_size and hidden_size",
    "lm_head": "vocab_size and hidden_size",
    "self_attn": "num_attention_heads, num_key_value_heads, head_dim and hidden_size",
    "mlp": "intermediate_size and hidden_size",
    "norm": "hidden_size",
}


class Held(NamedTuple):
    """A tensor as its file's header describes it."""

    file: str
    shape: tuple[int, ...]


class Pretrained:
    """One checkpoint. Every failure is a `CheckpointError` that says what to do."""

    def __init__(self, source: str) -> None:
        path = at_home(source)
        self.source = source
        self._directory = path if is_folder(path, CheckpointError) else None
        self._is_offline = False
        require_text_name(path, CheckpointError)
        if self._directory is None:
            require_checkpoint_name(source, CheckpointError)

    @property
    def name(self) -> str:
        """The name for people: the hub's, or the last part of the path."""
        return self.source if self._directory is None else self._directory.resolve().name

    def config(self) -> dict[str, object]:
        """config.json as it is."""
        path = self._file(CONFIG)
        if path is None:
            raise self._instead() or self._missing(
                f"{self.source} has no {CONFIG}: it is not a Hugging Face checkpoint. Save one with "
                "model.save_pretrained(DIRECTORY)."
            )
        if self._directory is not None and self._file(ADAPTER) is not None:
            raise CheckpointError(
                f"{self.source} has an adapter ({ADAPTER}), which changes what the model beside it computes. Merge "
                "it with peft, merge_and_unload(), then save_pretrained(DIRECTORY); or move it away."
            )
        return self._json(path, MAX_CONFIG_BYTES)

    def require_weights(self) -> None:
        """Raise `CheckpointError` unless a folder has weights. Those of the hub are looked for when they are read."""
        if self._directory is not None:
            self._places({})

    def settings(self, name: str) -> dict[str, object]:
        """A JSON file that it need not have, such as tokenizer_config.json; empty when it has none."""
        path = self._file(name)
        return {} if path is None else self._json(path, MAX_TOKENIZER_CONFIG_BYTES)

    def raw(self, name: str) -> bytes:
        """A small file that it need not have; empty when it has none."""
        path = self._file(name)
        try:
            if path is not None and path.stat().st_size > MAX_TOKENIZER_CONFIG_BYTES:
                raise ValueError(f"it is larger than {MAX_TOKENIZER_CONFIG_BYTES} bytes")
            return b"" if path is None else path.read_bytes()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{name} of {self.source} cannot be read ({error}). Get it again."
            ) from None

    def text(self, name: str) -> str:
        """A text file that it need not have; empty when it has none."""
        path = self._file(name)
        try:
            return "" if path is None else path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{name} of {self.source} cannot be read ({error}). Get it again."
            ) from None

    def held(self) -> dict[str, Held]:
        """Every tensor of its files by name, as their headers describe them. Of the hub all files are fetched."""
        files = [WHOLE] if self._file(WHOLE) is not None else sorted(set(self._index().values()))
        found = {}
        for file in files:
            with self._opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dictionary
                    found[name] = Held(file, tuple(opened.get_slice(name).get_shape()))
        return found

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors hold the same numbers."""
        places = self._places({one: (), other: ()})
        with self._opened(places[one]) as first, self._opened(places[other]) as second:
            return torch.equal(first.get_tensor(one), second.get_tensor(other))

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path = self._shard(file)
        try:
            with safe_open(path, framework="pt") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} of {self.source} is damaged or cut short ({error}). Get it again."
            ) from None

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor that is named, in that order, as float32 of the given shape."""
        places = self._places(shapes)
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for name, shape in shapes.items():
                file = places[name]
                if file not in files:
                    files[file] = stack.enter_context(self._opened(file))
                yield name, self._tensor(files[file], file, name, shape)

    def _tensor(self, opened: Any, file: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in opened.keys():  # noqa: SIM118  it is no dictionary
            raise CheckpointError(
                f"{file} of {self.source} has no tensor {name}, which this model needs. Save the whole model again, "
                "as AutoModelForCausalLM loads it, with save_pretrained."
            )
        header = opened.get_slice(name)
        found, kind = tuple(header.get_shape()), header.get_dtype()
        if found != shape:
            raise CheckpointError(
                f"{name} in {file} of {self.source} has the shape {found}, and {CONFIG} makes it {shape}: they are "
                f"not of one model. Correct {made_by(name)} there, or get both again."
            )
        if kind not in FLOATS:
            raise CheckpointError(
                f"{name} in {file} of {self.source} is of the type {kind}: quantized weights cannot be trained. "
                "Use the model's checkpoint in float32, bfloat16 or float16."
            )
        tensor: torch.Tensor = opened.get_tensor(name).float()
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} in {file} of {self.source} holds NaN or infinity. Get it again.")
        if tensor.numel() and tensor.abs().max() > LARGEST:
            raise CheckpointError(
                f"{name} in {file} of {self.source} holds numbers beyond {LARGEST:g}, as no model's weights are. "
                "Get it again."
            )
        return tensor

    def _places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """The file of each tensor."""
        if self._file(WHOLE) is not None:
            return dict.fromkeys(shapes, WHOLE)
        places = self._index()
        for name in shapes:
            if name not in places:
                raise CheckpointError(
                    f"{INDEX} of {self.source} names no file for {name}, which this model needs. Get it again, or "
                    "save the whole model with save_pretrained."
                )
        return {name: places[name] for name in shapes}

    def _index(self) -> dict[str, str]:
        """The file of each tensor as the index of the shards names it."""
        index = self._file(INDEX)
        if index is None:
            raise self._instead() or self._missing(
                f"{self.source} has neither {WHOLE} nor {INDEX}. Get the weights, too."
            )
        places = self._json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{INDEX} of {self.source} has no weight_map. Get it again.")
        for file in places.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{INDEX} of {self.source} names {file!r}, which is not a file beside it. Get it again."
                )
        return places

    def _instead(self) -> CheckpointError | None:
        """The error for what a folder holds in place of a checkpoint; None where that is not known."""
        names = self.names()
        if (error := instead_of(self.source, names, self._directory)) is not None:
            return error
        if self._directory is not None and not names:
            return CheckpointError(
                f"{self.source} is empty. Give the folder that config.json and the weights are in."
            )
        return None

    def names(self) -> list[str]:
        """The names of what it has, those of folders with them; of the hub, where it cannot be asked, none.

        Chat templates beside the first one have their folder in their names.
        """
        try:
            if self._directory is not None:
                there = [path.name for path in self._directory.iterdir()]
                templates = [
                    f"{TEMPLATES}/{path.name}" for path in (self._directory / TEMPLATES).glob("*.jinja")
                ]
                return [name for name in there if not name.startswith(".")] + templates + self._unfinished()
            return [] if self._is_offline else HfApi().list_repo_files(self.source)
        except Exception:  # noqa: BLE001  of the disk, the network and the name, by several libraries
            return []

    def _unfinished(self) -> list[str]:
        """The downloads in a folder that were cut short, also where `hf download --local-dir` keeps them."""
        assert self._directory is not None
        paths = [*self._directory.glob("*"), *self._directory.glob(".cache/huggingface/download/*")]
        return sorted(path.name for path in paths if UNFINISHED.fullmatch(path.name))

    def _shard(self, file: str) -> Path:
        path = self._file(file)
        if path is not None:
            return path
        if self._directory is not None and (parts := self._unfinished()):
            raise CheckpointError(
                f"{file} is missing in {self.source}, where a download was cut short ({parts[0]}). Start the "
                "download again."
            )
        raise self._missing(f"{file} is missing in {self.source}. Get it again.")

    def _missing(self, sentence: str) -> CheckpointError:
        """The error for a file that is not there, or that the hub could not be asked for."""
        if self._is_offline:
            return CheckpointError(
                f"The hub cannot be reached, and not all of {self.source} is on this machine. Check the connection, "
                "or give a local directory."
            )
        return CheckpointError(sentence)

    def _file(self, name: str) -> Path | None:
        """The path of the file, downloaded if need be; None when the checkpoint has none of this name."""
        if self._directory is not None:
            path = self._directory / name
            return self._itself(path) if is_there(path, CheckpointError) and path.is_file() else None
        try:
            return Path(hf_hub_download(self.source, name))
        except LocalEntryNotFoundError:
            self._is_offline = True
            return None
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise CheckpointError(
                f"{self.source} cannot be fetched from the hub ({type(error).__name__}). Check the name, and log in "
                "with `hf auth login` if it asks for that."
            ) from None

    def _itself(self, path: Path) -> Path:
        """The path, unless what is there stands for a file that is yet to be fetched."""
        try:
            with path.open("rb") as file:
                told = pointer_in(file.read(POINTER_BYTES), path)
        except OSError:
            told = ""  # whoever reads it says what is wrong
        if told:
            raise CheckpointError(f"{path.name} of {self.source} is yet to be fetched: {told}")
        return path

    def _json(self, path: Path, most: int) -> dict[str, object]:
        try:
            if path.stat().st_size > most:
                raise ValueError(f"it is larger than {most} bytes")
            contents = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(contents, dict):
                raise ValueError("it is not a JSON object")
        except RecursionError:
            raise CheckpointError(
                f"{path.name} of {self.source} cannot be read (it nests too deeply). Get it again."
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path.name} of {self.source} cannot be read ({error}). Get it again."
            ) from None
        return contents


def made_by(name: str) -> str:
    """The settings of config.json that make the shape of the tensor of that name."""
    return next((settings for part, settings in MADE_BY.items() if part in name), "it")


def stage_tensors(source: Pretrained, manifest: Manifest, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The stage's weights in the order in which they are in the flat tensor."""
    return source.tensors({place.name: place.shape for place in layout(parameter_shapes(manifest, stage))})


def stage_digest(source: Pretrained, manifest: Manifest, stage: int) -> str:
    """SHA-256 over the stage's flat float32 weights, in hex. Holds one tensor at a time."""
    sha = hashlib.sha256()
    for _, tensor in stage_tensors(source, manifest, stage):
        sha.update(tensor.contiguous().numpy().data.cast("B"))
    return sha.hexdigest()


def load_stage(source: Pretrained, manifest: Manifest, stage: int, replica: Replica) -> None:
    """Make the replica start from the checkpoint. Raises `CheckpointError`, also when it is not the run's."""
    assert manifest.start is not None
    sha = hashlib.sha256()

    def hashed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stage_tensors(source, manifest, stage):
            sha.update(tensor.contiguous().numpy().data.cast("B"))
            yield name, tensor

    replica.begin_with(hashed())
    if sha.hexdigest() != manifest.start.digests[stage]:
        raise CheckpointError(
            f"{source.source} is not the checkpoint that run '{manifest.name}' started from "
            f"('{manifest.start.name}'): the weights of stage {stage} differ. Give that one, or leave "
            "--from-checkpoint out and join when other replicas of the stage are there."
        )
