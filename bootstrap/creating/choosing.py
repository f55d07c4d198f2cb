"""What a new run is to be, from the options of the command that founds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bootstrap.creating.pretrained import model_of, unread_start, with_digests
from bootstrap.creating.run_tokenizer import chosen_tokenizer, with_tokenizer
from node.model.pretrained import Pretrained
from protocol.errors import ManifestError
from protocol.manifest import Manifest, load_preset, load_toml, manifest_from, toml_contents


@dataclass(frozen=True)
class RunOptions:
    """Options as they were given; all may be left out."""

    preset: str | None = None  # tiny, if there is no file either
    file: Path | None = None  # of a manifest, TOML
    tokenizer: str = ""  # a file or hub:NAME
    end_of_text: str = ""
    from_checkpoint: str | None = (
        None  # whose model and weights it starts from: a directory or a name on the hub
    )
    stages: int | None = None
    steps: int | None = None  # inner ones, which the learning rate follows

    def resolved(self) -> tuple[Manifest, bytes | None]:
        """The manifest, and its tokenizer.json unless bytes are tokens. All weights of the checkpoint are read.

        Raises `ManifestError`, `CheckpointError` or `TokenizerError`.
        """
        manifest = self._manifest()
        raw = chosen_tokenizer(self.tokenizer, self.from_checkpoint)
        if raw is not None:
            is_preset = self.file is None and self.from_checkpoint is None
            manifest = with_tokenizer(manifest, raw, self.end_of_text, is_preset=is_preset)
        return manifest, raw

    def _manifest(self) -> Manifest:
        if self.preset and self.file:
            raise ManifestError("Give either --preset or --manifest, not both.")
        if self.from_checkpoint is not None:
            return self._from_checkpoint(Pretrained(self.from_checkpoint))
        return self._adapted(load_toml(self.file) if self.file else load_preset(self.preset or "tiny"))

    def _from_checkpoint(self, source: Pretrained) -> Manifest:
        """The model is the checkpoint's; each stage has a digest of its weights, so their number comes first."""
        contents = toml_contents(self.file) if self.file else load_preset(self.preset or "tiny").model_dump()
        if self.file and "model" in contents:
            raise ManifestError(
                f"{self.file} has a [model] section, and --from-checkpoint makes one from config.json: remove it."
            )
        contents["model"] = model_of(source).model_dump()
        if self.stages is not None:
            contents["stages"] = self.stages
        contents["start"] = unread_start(source, contents.get("stages")).model_dump()
        return with_digests(source, self._adapted(manifest_from(contents)))

    def _adapted(self, manifest: Manifest) -> Manifest:
        """With the number of stages and steps that were asked for, validated anew."""
        contents = manifest.model_dump()
        if self.stages is not None:
            contents["stages"] = self.stages
        if self.steps is not None:
            contents["inner"]["total_steps"] = self.steps
            contents["inner"]["warmup_steps"] = min(contents["inner"]["warmup_steps"], self.steps - 1)
        return manifest_from(contents)
