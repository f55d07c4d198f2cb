"""The tokenizer of a run that is being founded: its name in the manifest, and the founder's copy of the file."""

from __future__ import annotations

from pathlib import Path

from node.data.datasets_library import HUB
from node.data.tokenizer import (
    FILE_NAME,
    FileTokenizer,
    end_of_text_in,
    identity_of,
    load_tokenizer,
    read_tokenizer,
    require_fit,
)
from protocol.errors import StateError, TokenizerError
from protocol.manifest import BYTES, Manifest, manifest_from

_ROUNDED_TO = 64  # rows of an embedding: what matrix units like


def chosen_tokenizer(named: str, checkpoint: str | None) -> bytes | None:
    """The run's tokenizer.json: the one named, else the checkpoint's own, None where bytes are tokens."""
    if not named and checkpoint:
        place = Path(checkpoint)
        if not place.exists():
            named = HUB + checkpoint
        elif (place / FILE_NAME).exists():
            named = checkpoint
    return read_tokenizer(named) if named else None


def with_tokenizer(
    manifest: Manifest, raw: bytes, end_of_text: str = "", *, is_preset: bool = False
) -> Manifest:
    """The manifest with the tokenizer.json `raw` as its tokenizer.

    `end_of_text` names the token between documents; empty finds it by the names in use. A preset's vocabulary is
    made to fit; raises `TokenizerError` when that of a person's own manifest does not, or names another tokenizer.
    """
    if manifest.data.tokenizer not in (BYTES, identity_of(raw)):
        raise TokenizerError(
            "The manifest names another tokenizer than --tokenizer gives: delete data.tokenizer from it, or give the "
            f"file whose hash is {manifest.data.tokenizer[:23]}…"
        )
    end_of_text = end_of_text or manifest.data.end_of_text or end_of_text_in(raw)
    tokenizer = FileTokenizer(raw, end_of_text)
    contents = manifest.model_dump()
    contents["data"] |= {"tokenizer": identity_of(raw), "end_of_text": end_of_text}
    if is_preset:
        contents["model"]["vocab_size"] = -(-tokenizer.size // _ROUNDED_TO) * _ROUNDED_TO
    else:
        require_fit(tokenizer, manifest.model.vocab_size)
    return manifest_from(contents)


def kept_tokenizer(directory: Path, manifest: Manifest, raw: bytes | None) -> bytes | None:
    """Keep the founder's copy in `directory`, or take up the one kept there; None where bytes are tokens.

    Raises `TokenizerError` when the manifest names a tokenizer and its file is neither given nor there.
    """
    if manifest.data.tokenizer == BYTES:
        return None
    path = directory / FILE_NAME
    if raw is None and not path.exists():
        raise TokenizerError(
            "The manifest names a tokenizer. Give its tokenizer.json with --tokenizer FILE: members get it from here."
        )
    raw = read_tokenizer(str(path)) if raw is None else raw
    load_tokenizer(raw, manifest)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    except OSError as error:
        raise StateError(f"Cannot write {path} ({error.strerror}). Choose another --dir.") from None
    return raw
