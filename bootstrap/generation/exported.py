"""An export, or any checkpoint of transformers' layout, loaded and asked by plain transformers code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError

from bootstrap.export.folder import PARTIAL
from bootstrap.export.tokenizer import ModelTokenizer
from bootstrap.generation.decoding import Decoding
from node.data.tokenizer_files import CONFIG, FILE_NAME, read_tokenizer
from node.machine.limits import optional
from node.machine.named import is_folder, is_there, require_text_name
from node.model.pretrained import Pretrained
from protocol.errors import StateError

LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, TypeError, AttributeError)
MODEL = "config.json"


@dataclass(frozen=True)
class ExportedModel:
    """A model and its tokenizer; `context` is the longest text in tokens."""

    model: Any
    tokenizer: ModelTokenizer
    context: int


def load_exported(directory: Path) -> ExportedModel:
    """Load the model in a directory; nothing is fetched from anywhere.

    Raises `StateError` and `CheckpointError` with one line on what is wrong with the directory, and `MissingPackage`
    where transformers is not installed.
    """
    require_text_name(directory, StateError)
    if not is_folder(directory):
        raise StateError(f"There is no directory {directory}. Give --model what `noloco export --out` wrote.")
    if not is_there(directory / MODEL) and is_there(directory / PARTIAL):
        raise StateError(
            f"{directory} holds no model: it has no config.json. Give --model the directory of an export; one that "
            "was cut short goes on with the same `noloco export --out`."
        )
    source = Pretrained(str(directory))
    source.config()
    source.require_weights()
    transformers = optional("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()  # ours is the only one on the screen
    tokenizer = tokenizer_in(directory)
    try:
        loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype="auto", output_loading_info=True
        )
        model = loaded.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    except LOADING_ERRORS as error:
        raise StateError(
            f"The model in {directory} cannot be loaded ({_first_line(error)}). Export it again."
        ) from None
    if missing := sorted(found["missing_keys"]):  # transformers draws them at random
        raise StateError(
            f"The model in {directory} cannot be loaded (its files have no {missing[0]}, which its config.json asks "
            "for). Export it again."
        )
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        raise StateError(f"The model in {directory} holds NaN or infinity. Export it again.")
    # the model may know more positions than the run trained it on
    context = min(int(getattr(model.config, "max_position_embeddings", 2**31)), tokenizer.context)
    return ExportedModel(model, tokenizer, context)


def tokenizer_in(directory: Path) -> ModelTokenizer:
    """Load the tokenizer in a directory. Raises `StateError` when it has none that can be loaded."""
    if not any(is_there(directory / name) for name in (FILE_NAME, CONFIG)):
        raise StateError(f"{directory} has no {FILE_NAME}. Copy the one of the run or of the model there.")
    settings = _settings(directory / CONFIG)
    try:
        file = tokenizers.Tokenizer.from_str(read_tokenizer(str(directory)).decode())
        begin, end = (_name_of(settings.get(f"{name}_token")) for name in ("bos", "eos"))
        length = settings.get("model_max_length")
        context = int(length) if isinstance(length, int | float) and 0 < length < 2**31 else 2**31
        if end is None:  # where the settings leave out what is usual for their class
            token = _settings(directory / MODEL).get("eos_token_id")
            end = file.id_to_token(token) if isinstance(token, int) and token >= 0 else None
        return ModelTokenizer(file, begin, end, context)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise StateError(
            f"The tokenizer in {directory} is unknown or damaged ({_first_line(error)}). Copy the run's there."
        ) from None


def _settings(path: Path) -> dict[str, object]:
    """Settings of a file that may be missing or damaged, which then says nothing."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _name_of(token: object) -> str | None:
    """Name of a special token, which older files tell with its settings."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


class _Stream:
    """A streamer of transformers: passes each new token on; the prompt, which comes first, is skipped."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            for token in value.flatten().tolist():
                self._tell(int(token))
        self._is_prompt = False

    def end(self) -> None:
        pass


def generate_tokens(
    loaded: ExportedModel, prompt: list[int], decoding: Decoding, tell: Callable[[int], None]
) -> None:
    """Tell each token after `prompt` when it is there, by transformers' own `generate`; until the context is full."""
    inputs = torch.tensor([prompt], device=loaded.model.device)
    room = min(decoding.most_tokens, loaded.context - len(prompt))
    torch.manual_seed(decoding.seed)
    loaded.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        streamer=_Stream(tell),
        max_new_tokens=room,
        **decoding.for_transformers(),
    )
