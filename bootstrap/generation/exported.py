"""An export, or any checkpoint of transformers' layout, loaded and asked by plain transformers code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from bootstrap.generation.generate_cli import Decoding
from protocol.errors import StateError

LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, TypeError, AttributeError)


@dataclass(frozen=True)
class ExportedModel:
    """A model and its tokenizer; `context` is the longest text in tokens."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    context: int


def load_exported(directory: Path) -> ExportedModel:
    """Raises `StateError` with one line on what is wrong with the directory; nothing is fetched from anywhere."""
    if not directory.is_dir():
        raise StateError(f"There is no directory {directory}. Give --model what `noloco export --out` wrote.")
    if not (directory / "config.json").exists():
        raise StateError(
            f"{directory} holds no model: it has no config.json. Give --model the directory of an export; one that "
            "was cut short goes on with the same `noloco export --out`."
        )
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise StateError(
            f"The model in {directory} cannot be loaded (config.json is damaged). Export it again."
        ) from None
    transformers_logging.disable_progress_bar()  # ours is the only one on the screen
    tokenizer = load_tokenizer(directory)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype="auto").eval()
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    except LOADING_ERRORS as error:
        raise StateError(
            f"The model in {directory} cannot be loaded ({_first_line(error)}). Export it again."
        ) from None
    # the model may know more positions than the run trained it on
    context = min(int(getattr(model.config, "max_position_embeddings", 2**31)), tokenizer.model_max_length)
    return ExportedModel(model, tokenizer, context)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises `StateError` when the directory has no tokenizer that can be loaded."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise StateError(f"{directory} has no tokenizer.json. Copy the one of the run or of the model there.")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # noqa: BLE001  what the library raises differs with the fault and its version
        raise StateError(
            f"The tokenizer in {directory} is unknown or damaged ({_first_line(error)}). Copy the run's there."
        ) from None
    return tokenizer


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


class _Stream(BaseStreamer):  # type: ignore[misc]
    """Passes each new token on; the prompt, which comes first, is skipped."""

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
    set_seed(decoding.seed)
    loaded.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        streamer=_Stream(tell),
        max_new_tokens=room,
        **decoding.for_transformers(),
    )
