"""The small files of the checkpoint that a run started from: its manifest carries them, and exports have them again.

Byte for byte, unless the run has changed what one of them says: its end of a text, or the type of the numbers.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from bootstrap.export.ends import (
    BY_ID,
    BY_NAME,
    GENERATION,
    SPECIAL_TOKENS,
    end_said,
    named_end,
    numbered_ends,
)
from bootstrap.export.model_config import model_in
from bootstrap.export.tokenizer import ModelTokenizer
from node.data.tokenizer_files import CONFIG as TOKENIZER_CONFIG
from node.data.tokenizer_files import FILE_NAME
from node.model.checkpoint_kinds import CONFIG
from protocol.run.manifest import Manifest
from protocol.run.start import MOST_FILES_BYTES

NAMES = (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    "chat_template.jinja",
    "added_tokens.json",
)
MOST_UNPACKED = (
    2**22
)  # bytes; Mistral's tokenizer_config.json has 2**17, of which 1 in 30 are left when packed
# files of a checkpoint that describe its model or tokenizer as well: exports leave them out, and the card names them
BESIDE = re.compile(
    r"additional_chat_templates/[^/]+\.jinja|chat_template\.json|(pre)?processor_config\.json|tokenizer\.model.*"
    r"|spiece\.model|sentencepiece\.bpe\.model|tekken\.json|vocab\.(json|txt)|merges\.txt|[^/]+\.py"
)
_LEFT_OUT = "left-out"  # in place of a file's name: the names of those that are not carried
_NAME = re.compile(r"[\w./-]{1,100}")
_MOST_NAMED = 20
Settings = dict[str, Any]


def packed(files: Mapping[str, bytes], beside: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The files as a manifest carries them, and the names of those for which it has no room.

    The manifest also has these names, and those of the files `beside` them, for model cards.
    """
    taken: dict[str, bytes] = {}
    left_out: list[str] = []
    for name in files:
        if _has_room(taken | {name: files[name]}, [*files, *beside]):
            taken[name] = files[name]
        else:
            left_out.append(name)
    named = [*left_out, *beside]
    return (_written(taken, named) if taken or named else ""), left_out


def _has_room(files: Mapping[str, bytes], names: Sequence[str]) -> bool:
    return len(_written(files, names)) <= MOST_FILES_BYTES and sum(map(len, files.values())) <= MOST_UNPACKED


def _written(files: Mapping[str, bytes], names: Sequence[str]) -> str:
    known = [name for name in names if _NAME.fullmatch(name)][:_MOST_NAMED]
    contents = {**files, _LEFT_OUT: "\n".join(known).encode()} if known else files
    return base64.b64encode(zlib.compress(msgpack.packb(contents), 9)).decode()


def unpacked(text: str) -> dict[str, bytes]:
    """The files that a manifest carries, which comes from others; none where it cannot be read."""
    return {name: raw for name, raw in _contents(text).items() if name in NAMES}


def left_out_of(text: str) -> list[str]:
    """The names of the checkpoint's files that a manifest has not, by what it carries."""
    names = _contents(text).get(_LEFT_OUT, b"").decode(errors="replace").splitlines()
    return [name for name in names if _NAME.fullmatch(name)][:_MOST_NAMED]


def _contents(text: str) -> dict[str, bytes]:
    try:
        beginning = zlib.decompressobj().decompress(base64.b64decode(text), MOST_UNPACKED + 2**16)
        files = msgpack.unpackb(beginning)
    except (ValueError, zlib.error, msgpack.UnpackException):
        return {}
    found = files.items() if isinstance(files, dict) else ()
    return {name: raw for name, raw in found if isinstance(name, str) and isinstance(raw, bytes)}


@dataclass(frozen=True)
class Carried:
    """The files of an export that are the checkpoint's, and for the model card what was changed in them."""

    files: Mapping[str, bytes]
    changes: Mapping[str, str]  # by name
    left_out: Sequence[str] = ()  # of the checkpoint's files, those that the export has not

    def as_markdown(self, checkpoint: str) -> str:
        """A section of the model card; empty where there are none."""
        if not self.files and not self.left_out:
            return ""
        same = ", ".join(name for name in self.files if name not in self.changes)
        lines = [f"- as they are in `{checkpoint}`, byte for byte: {same}"] if same else []
        lines += [f"- {name} but for {change}" for name, change in self.changes.items()]
        if self.left_out:
            lines.append(f"- only in `{checkpoint}`, not carried here: {', '.join(self.left_out)}")
        listed = "\n".join(lines)
        return f"## Files of the checkpoint that the run started from\n\n{listed}\n\n"


def carried(manifest: Manifest, raw: bytes | None, tokenizer: ModelTokenizer, dtype: str) -> Carried:
    """The checkpoint's files for an export of this `dtype`; `raw` is the run's tokenizer.json, if it has one."""
    text = manifest.start.files if manifest.start is not None else ""
    files, left_out = unpacked(text), left_out_of(text)
    changes: dict[str, str] = {}
    parsed = {name: _settings(files[name]) for name in files if name.endswith(".json")}
    if files and raw is not None:
        files[FILE_NAME] = raw
        if end_said(lambda name: parsed.get(name, {}), raw)[0] != manifest.data.end_of_text:
            for name in (*BY_NAME, *BY_ID):
                if _end_changed(parsed.get(name, {}), tokenizer, manifest.data.end_of_text):
                    changes[name] = "the end of a text"
    config = parsed.get(CONFIG, {})
    if other := [name for name in ("dtype", "torch_dtype") if config.get(name, dtype) != dtype]:
        config |= dict.fromkeys(other, dtype)
        changes[CONFIG] = " and ".join([*filter(None, [changes.get(CONFIG)]), "the type of the numbers"])
    if CONFIG in files and not _describes(
        config, manifest
    ):  # its own words are kept: the ids that begin and pad
        config["tie_word_embeddings"] = manifest.model.tied_embeddings  # what a founding may correct
        changes[CONFIG] = " and ".join([*filter(None, [changes.get(CONFIG)]), "tie_word_embeddings"])
    if CONFIG in files and not _describes(config, manifest):
        del files[CONFIG]  # it is written anew
        changes.pop(CONFIG, None)
        left_out.append(CONFIG)
    for name in changes:
        files[name] = (json.dumps(parsed[name], indent=2, ensure_ascii=False) + "\n").encode(errors="replace")
    return Carried(files, changes, left_out)


def _settings(raw: bytes) -> Settings:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _end_changed(settings: Settings, tokenizer: ModelTokenizer, end: str) -> bool:
    """Have settings that say an end of a text say this one; return whether that is another."""
    if (name := named_end(settings)) and name != end:
        said = settings["eos_token"]
        settings["eos_token"] = said | {"content": end} if isinstance(said, dict) else end
        return True
    if (ids := numbered_ends(settings)) and tokenizer.end not in ids:
        settings["eos_token_id"] = tokenizer.end
        return True
    return False


def _describes(config: Settings, manifest: Manifest) -> bool:
    """Return whether a config.json, which comes from others, is that of the run's model."""
    try:
        return model_in(config).model_copy(update={"seed": manifest.model.seed}) == manifest.model
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
