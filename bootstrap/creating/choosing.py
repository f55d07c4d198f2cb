"""The choice of a new run by the options of the command that founds it: model, tokenizer, stages, steps."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from bootstrap.creating.chat_template import chat_template_of
from bootstrap.creating.held_tensors import fitted
from bootstrap.creating.positions import longer_than_positions
from bootstrap.creating.probing import probe
from bootstrap.creating.visit_token import run_key
from bootstrap.display import write_whole, writing
from bootstrap.export.byte_tokenizer import is_byte_tokenizer
from bootstrap.export.carried import BESIDE, NAMES, packed
from bootstrap.export.ends import end_of_text_of
from bootstrap.export.model_config import FAMILIES, model_in
from node.data.tokenizer import FileTokenizer, end_of_text_in, identity_of, load_tokenizer, require_fit
from node.data.tokenizer_files import FILE_NAME, others_in, read_tokenizer
from node.machine.home import at_home
from node.machine.named import HUB, is_there
from node.model.checkpoint_kinds import CONFIG
from node.model.pretrained import Pretrained, stage_digest
from protocol.errors import CheckpointError, ManifestError, RecordError, StateError, TokenizerError
from protocol.run.manifest import (
    BYTES,
    Manifest,
    load_preset,
    load_toml,
    manifest_from,
    toml_contents,
)
from protocol.run.model import Model
from protocol.run.piece_hashes import PieceHashes
from protocol.run.signed_manifest import SignedManifest
from protocol.run.start import Start

logger = logging.getLogger(__name__)

HASHES_NAME = "tokenizer.hashes"
UNKNOWN_DIGEST = "0" * 64
BYTE_VALUES = 256
_ROUNDED_TO = 64  # rows of an embedding: what matrix units like


@dataclass(frozen=True)
class RunOptions:
    """The options as given; each may be missing."""

    preset: str | None = None  # tiny, if there is no file either
    file: Path | None = None  # of a manifest, TOML
    tokenizer: str = ""  # a file or hub:NAME
    end_of_text: str = ""
    from_checkpoint: str | None = None  # whose model and weights to start from: a directory or a hub name
    stages: int | None = None
    steps: int | None = None  # inner ones, which the learning rate follows
    private: bool | None = None

    def resolved(self) -> tuple[Manifest, bytes | None]:
        """The manifest, and its tokenizer.json unless bytes are tokens. All weights of the checkpoint are read.

        Raises `ManifestError`, `CheckpointError` or `TokenizerError`.
        """
        manifest = self._manifest()
        raw = chosen_tokenizer(self.tokenizer, self.from_checkpoint)
        if raw is not None:
            end = self.end_of_text or manifest.data.end_of_text or self._end_said(raw)
            is_preset = self.file is None and self.from_checkpoint is None
            manifest = with_tokenizer(manifest, raw, end, is_preset=is_preset)
        elif self.from_checkpoint is not None:
            _require_bytes(manifest, self.from_checkpoint)
        else:
            _require_tokens(manifest, self.file)
        if told := longer_than_positions(manifest):
            logger.warning("%s", told)
        if self.from_checkpoint is not None:
            source = Pretrained(self.from_checkpoint)
            manifest = with_digests(source, fitted(source, manifest))
            manifest = with_small_files(source, manifest, has_tokenizer=not self.tokenizer)
        return manifest, raw

    def _end_said(self, raw: bytes) -> str:
        """The end of a text by the files that the tokenizer comes with; empty where it comes with none."""
        place = self.tokenizer.removeprefix(HUB)
        if self.tokenizer and not self.tokenizer.startswith(HUB):
            path = at_home(place)
            place = str(path if path.is_dir() else path.parent)
            if not path.is_dir() and path.name != FILE_NAME:
                return ""
        source = place or self.from_checkpoint
        return end_of_text_of(Pretrained(source), raw) if source else ""

    def _manifest(self) -> Manifest:
        if self.preset and self.file:
            raise ManifestError("Give either --preset or --manifest, not both.")
        if self.from_checkpoint is not None:
            return self._from_checkpoint(Pretrained(self.from_checkpoint))
        return self._adapted(load_toml(self.file) if self.file else load_preset(self.preset or "tiny"))

    def _from_checkpoint(self, source: Pretrained) -> Manifest:
        """The model is the checkpoint's. Each stage is to have a digest of its weights, which are not read yet."""
        contents = toml_contents(self.file) if self.file else load_preset(self.preset or "tiny").model_dump()
        if self.file and "model" in contents:
            raise ManifestError(
                f"{self.file} has a [model] section, and --from-checkpoint makes one from config.json: remove it."
            )
        model = model_of(source)
        contents["model"] = model.model_dump()
        source.require_weights()
        if self.stages is not None:
            contents["stages"] = self.stages
        elif not self.file:  # a preset's own are for its own model
            contents["stages"] = min(load_preset(self.preset or "tiny").stages, model.layers)
        contents["start"] = unread_start(source, contents.get("stages")).model_dump()
        return self._adapted(manifest_from(contents))

    def _adapted(self, manifest: Manifest) -> Manifest:
        """Set what was asked for of stages, steps and access, and validate the manifest again."""
        contents = manifest.model_dump()
        if self.stages is not None:
            contents["stages"] = self.stages
        if self.steps is not None:
            contents["inner"]["total_steps"] = self.steps
            contents["inner"]["warmup_steps"] = min(contents["inner"]["warmup_steps"], self.steps - 1)
        if self.private is not None:
            contents["access"]["private"] = self.private
        return manifest_from(contents)


def _require_tokens(manifest: Manifest, file: Path | None) -> None:
    """Refuse a preset, or a manifest of that `file`, that lacks its tokenizer. Raises `ManifestError`."""
    if manifest.data.tokenizer != BYTES or not manifest.model.outgrows_bytes:
        return
    what = f"The preset {manifest.name}" if file is None else f"The manifest {file}"
    for_bytes = (
        f"write a manifest: noloco init run.toml --preset {manifest.name} --vocab 256"
        if file is None
        else "set model.vocab_size = 256 in it"
    )
    raise ManifestError(
        f"{what} has {manifest.model.vocab_size:,} tokens, of which bytes would use 256. Name "
        "the tokenizer of the text to train on: --tokenizer tokenizer.json, or --tokenizer hub:NAME. "
        f"For bytes, {for_bytes}."
    )


def _require_bytes(manifest: Manifest, checkpoint: str) -> None:
    """Refuse a checkpoint without a tokenizer whose ids are not bytes. Raises `TokenizerError`."""
    if manifest.data.tokenizer == BYTES and manifest.model.vocab_size != BYTE_VALUES:
        raise TokenizerError(
            f"{checkpoint} has no {FILE_NAME}, and its {manifest.model.vocab_size:,} tokens are not bytes. Name the "
            "tokenizer that it was trained with: --tokenizer tokenizer.json, or --tokenizer hub:NAME."
        )


def model_of(source: Pretrained) -> Model:
    """The [model] section for config.json. Raises `CheckpointError` for what cannot be trained here."""
    raw = source.config()
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(
            f"{source.source} is a model of the type {family!r}. Those that can be trained here are: "
            f"{', '.join(FAMILIES)}."
        )
    if any(raw.get(name) is not None for name in ("quantization_config", "quantization")):  # MLX's
        raise CheckpointError(
            f"{source.source} is quantized, and such weights cannot be trained. Use the model that it was made from."
        )
    try:
        return model_in(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg'].removeprefix('Value error, ')}"
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[-1].strip() or type(error).__name__
    raise CheckpointError(
        f"{CONFIG} of {source.source} describes a model that cannot be used ({reason}). Get it again, or use "
        "another checkpoint."
    )


def unread_start(source: Pretrained, stages: object) -> Start:
    """The [start] section with digests still to be computed, once the stages are known to fit the model."""
    count = stages if isinstance(stages, int) and 0 < stages <= 512 else 1
    return Start(name=re.sub(r"[^\w./-]", "-", source.name)[:128], digests=(UNKNOWN_DIGEST,) * count)


def with_digests(source: Pretrained, manifest: Manifest) -> Manifest:
    """The manifest with the digest of each stage's weights, all of which are read and checked."""
    assert manifest.start is not None
    logger.info("Reading the weights of %s: their SHA-256 goes into the manifest.", source.name)
    digests = tuple(stage_digest(source, manifest, stage) for stage in range(manifest.stages))
    return manifest.model_copy(update={"start": manifest.start.model_copy(update={"digests": digests})})


def with_small_files(source: Pretrained, manifest: Manifest, *, has_tokenizer: bool = True) -> Manifest:
    """The manifest with the checkpoint's chat template and settings, which exports have again.

    With another tokenizer than the checkpoint's, which does not know their tokens, it has their names alone. Those
    for which it has no room are left out with a warning. Raises `CheckpointError`.
    """
    assert manifest.start is not None
    found = {name: raw for name in NAMES if (raw := source.raw(name))}
    beside = sorted(name for name in source.names() if BESIDE.fullmatch(name))
    if not has_tokenizer:
        text, _ = packed({}, [*found, *beside])
        return manifest.model_copy(update={"start": manifest.start.model_copy(update={"files": text})})
    files, left_out = packed(found, beside)
    if left_out:
        logger.warning(
            "The manifest has no room for %s of %s: exports will have their own. Copy them from there.",
            ", ".join(left_out),
            source.source,
        )
    if beside:
        logger.warning(
            "Files of %s that exports will not have, and that their model cards name: %s.",
            source.source,
            ", ".join(beside),
        )
    start = manifest.start.model_copy(update={"chat_template": chat_template_of(source), "files": files})
    return manifest.model_copy(update={"start": start})


def chosen_tokenizer(named: str, checkpoint: str | None) -> bytes | None:
    """The run's tokenizer.json: the one named, else the checkpoint's own, None where bytes are tokens."""
    if named:
        return read_tokenizer(named)
    if not checkpoint:
        return None
    place = at_home(checkpoint)
    if not is_there(place, CheckpointError):
        return read_tokenizer(HUB + checkpoint)
    if not is_there(place / FILE_NAME, CheckpointError) and not others_in(place):
        return None
    raw = read_tokenizer(str(place))
    return None if is_byte_tokenizer(raw) else raw


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
    if lost := probe(raw, end_of_text):
        logger.warning("%s", lost)
    contents = manifest.model_dump()
    contents["data"] |= {"tokenizer": identity_of(raw), "end_of_text": end_of_text}
    if is_preset:
        contents["model"]["vocab_size"] = rows_for(tokenizer)
    else:
        require_fit(tokenizer, manifest)
        _tell_rowless(tokenizer, manifest)
    return manifest_from(contents)


def rows_for(tokenizer: FileTokenizer) -> int:
    """Return the vocabulary of a model for the tokenizer."""
    return -(-tokenizer.tokens // _ROUNDED_TO) * _ROUNDED_TO


def _tell_rowless(tokenizer: FileTokenizer, manifest: Manifest) -> None:
    rowless = tokenizer.tokens - manifest.model.vocab_size
    if rowless > 0:
        logger.warning(
            "Tokens of the tokenizer without a row in the model: %d, all of them special. No text becomes one, so "
            "training does without; do not give them to the model, either.",
            rowless,
        )


def kept_tokenizer(
    directory: Path, manifest: Manifest, raw: bytes | None, *, is_new: bool = False
) -> bytes | None:
    """Keep the founder's copy in `directory`, or take up the one kept there; None where bytes are tokens.

    Raises `TokenizerError` when the manifest names a tokenizer and its file is neither given nor there, `StateError`
    when the run is new and `directory` has another tokenizer, which is not the run's to replace.
    """
    if manifest.data.tokenizer == BYTES:
        return None
    path = directory / FILE_NAME
    if raw is None and not is_there(path):
        raise TokenizerError(
            "The manifest names a tokenizer. Give its tokenizer.json with --tokenizer FILE: members get it from here."
        )
    if raw is None:
        raw = read_tokenizer(str(path))
        if identity_of(raw) != manifest.data.tokenizer:
            raise TokenizerError(
                f"{path} is damaged: it is not the file that the manifest names. Give the run's tokenizer.json again "
                "with --tokenizer FILE, or copy it from the state directory of any member."
            )
    load_tokenizer(raw, manifest)
    with writing(path, "Choose another --state-dir."):
        directory.mkdir(parents=True, exist_ok=True)
    is_kept = is_there(path)
    if not (is_kept and path.read_bytes() == raw):
        if is_kept and is_new:
            raise StateError(f"{path} is another tokenizer than the new run's. Choose another --state-dir.")
        write_whole(path, raw, "Choose another --state-dir.")
    return raw


def kept_hashes(directory: Path, signed: SignedManifest, raw: bytes | None) -> bytes:
    """Return the signed hashes of the tokenizer's pieces, kept in `directory`; made while the run's key is there.

    Empty where bytes are tokens, and in a run founded before there were any whose key is elsewhere. Raises
    `StateError` when they cannot be written.
    """
    if raw is None:
        return b""
    path, tokenizer = directory / HASHES_NAME, signed.manifest.data.tokenizer
    if is_there(path):
        try:
            sealed = path.read_bytes()
            PieceHashes.read(sealed, tokenizer, signed.public_key)
            return sealed
        except (OSError, RecordError) as damage:
            logger.warning("%s cannot be used (%s).", path, damage)
    key = run_key(directory, signed)
    sealed = PieceHashes.sign(raw, tokenizer, key) if key is not None else b""
    if sealed:
        write_whole(path, sealed, "Choose another --state-dir.")
    return sealed
