"""What a folder holds that was meant for a checkpoint and is none: known by its files' names, and what helps."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from node.machine.kinds import Kind
from node.machine.named import quoted
from protocol.errors import CheckpointError

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
UNFINISHED = re.compile(r".*\.(incomplete|part|partial|crdownload|download|aria2|!qB|opdownload)")
SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_OF_ITS_SOURCE = "Use the checkpoint in safetensors that it was made from."
_BY_TRANSFORMERS_4 = (
    "load it with transformers 4, from_pretrained(DIRECTORY, {}=True), and save_pretrained it."
)


KINDS = (
    Kind(
        "an adapter (LoRA), not a model",
        r"adapter_config\.json|adapter_model\..*|pytorch_lora_weights\..*",
        "Merge it into its base with peft, merge_and_unload(), then save_pretrained(DIRECTORY).",
    ),
    Kind(
        "a pipeline of diffusers",
        r"model_index\.json|diffusion_pytorch_model.*|unet|vae",
        "Use a language model's checkpoint.",
    ),
    Kind("a GGUF file", r".*\.(gguf|ggml|ggjt)|ggml-.*|.*\.llamafile", _OF_ITS_SOURCE),
    Kind("an ONNX model", r".*\.(onnx|ort)(_data)?|onnx", _OF_ITS_SOURCE),
    Kind(
        "a model compiled for one program or device",
        r"openvino_.*|.*\.(engine|plan|mlpackage|mlmodelc?|tflite|pte|dlc|rknn)",
        _OF_ITS_SOURCE,
    ),
    Kind(
        "weights of MLX",
        r"weights\.npz|weights(\.\d+)?\.safetensors",
        "Use the checkpoint that it was made from, or convert it with mlx_lm.fuse --de-quantize.",
    ),
    Kind(
        "weights in Mistral's own format",
        r"consolidated(-\d{5}-of-\d{5})?\.safetensors",
        f"Get {WHOLE}, or the files of {INDEX}, of the same model: they are in transformers' format.",
    ),
    Kind(
        "pickled weights only, in Meta's own format, which could run any code when they are opened",
        r"consolidated.*\.pth",
        "Get the same model in transformers' format: its repository's name ends in -hf or is the same one.",
    ),
    Kind(
        "the state of a training on several devices",
        r"zero_to_fp32\.py|global_step\d+|mp_rank_\d+.*|.*\.distcp|pytorch_model_fsdp.*|latest_checkpointed_iteration\.txt",
        "Have the program that wrote it gather the weights (DeepSpeed: python zero_to_fp32.py . OUT "
        "--safe_serialization), or save with save_pretrained.",
    ),
    Kind(
        "weights of TensorFlow",
        r".*\.(h5|keras|pb)|.*\.ckpt[.-].*",
        f"Convert it: {_BY_TRANSFORMERS_4.format('from_tf')}",
    ),
    Kind(
        "weights of Flax",
        r"flax_model.*\.msgpack.*|.*\.orbax.*",
        f"Convert it: {_BY_TRANSFORMERS_4.format('from_flax')}",
    ),
    Kind(
        "a model of another program",
        r".*\.(nemo|ot|marlin|caffemodel|params|joblib)",
        "Export it from there as transformers' save_pretrained writes it.",
    ),
    Kind("a download that was cut short", UNFINISHED.pattern, "Start the download again."),
    Kind(
        f"parts of a model without {INDEX}",
        SHARD.pattern,
        "Get that file, and all the parts that it names, from where they are from.",
    ),
    Kind(
        "pickled weights only, which could run any code when they are opened",
        r"(?!training_args|optimizer|scheduler|rng_state|scaler).*\.(bin|pt|pth|ckpt|pkl|pickle|bin\.index\.json)",
        "Convert it: load it with transformers where you trust it, and save_pretrained writes safetensors.",
    ),
    Kind(
        "safetensors under a name that is not looked for",
        r".*\.safetensors",
        f"If it is the whole model, rename it to {WHOLE}.",
    ),
    Kind(
        "a packed archive",
        r".*\.(tar|tgz|tar\.\w+|zip|7z|rar|zst)",
        "Unpack it, and name the folder that comes out.",
    ),
    Kind(
        "the cache of the Hugging Face hub",
        r"models--.*|snapshots",
        "Name the model as organisation/model, or the folder below snapshots.",
    ),
    Kind(
        "several checkpoints of a training",
        r"checkpoint-\d+",
        "Name one of them.",
    ),
)


_MEANT = KINDS[:2]  # what has such files has been meant, whatever lies in folders of it
_DEEPEST, _MOST_FOLDERS = (
    3,
    1_000,
)  # where checkpoints are looked for: in the hub's cache they lie three levels down


def kind_of(names: Collection[str]) -> tuple[Kind[str], str] | None:
    """The kind of what a folder with files of these names holds, and the name that shows it; None for none known."""
    if WHOLE in names or INDEX in names:
        names = [name for name in names if name != WHOLE and not SHARD.fullmatch(name)]
    for kind in KINDS:
        found = sorted(name for name in names if re.fullmatch(kind.pattern, name, re.IGNORECASE))
        if found:
            return kind, found[0]
    return None


def instead_of(source: str, names: Collection[str], directory: Path | None) -> CheckpointError | None:
    """The error for what a folder without a checkpoint has in place of one; None where that is not known.

    `names` are those of its files and folders. A checkpoint in a folder of it is named, unless it has itself what
    shows that it was meant.
    """
    found = kind_of(names)
    is_meant = found is not None and found[0] in _MEANT
    below = [] if directory is None or is_meant else checkpoints_below(directory)
    if len(below) == 1:
        return CheckpointError(
            f"{source} has its checkpoint in a folder of it. Name that: {quoted(below[0])}."
        )
    if below:
        return CheckpointError(
            f"{source} has {len(below)} checkpoints in folders of it. Name one, as the last: {quoted(below[-1])}."
        )
    if found is None:
        return None
    kind, name = found
    return CheckpointError(f"{source} has {kind.what} ({name}). {kind.help}")


def checkpoints_below(directory: Path) -> list[Path]:
    """The folders below with a config.json and weights, those of a training by their steps; a few levels deep."""
    found: list[Path] = []
    for number, (folder, folders, files) in enumerate(os.walk(directory)):
        place = Path(folder)
        depth = len(place.relative_to(directory).parts)
        if number and CONFIG in files and (WHOLE in files or INDEX in files):
            found.append(place)
        is_deep = depth >= _DEEPEST or number > _MOST_FOLDERS
        folders[:] = [] if is_deep else sorted(name for name in folders if not name.startswith("."))
    return sorted(found, key=lambda place: [int(part) if part.isdigit() else part for part in _parts(place)])


def _parts(place: Path) -> list[str]:
    """The parts of a path between which numbers stand, in turns, so that two lists of them compare."""
    return re.split(r"(\d+)", str(place))
