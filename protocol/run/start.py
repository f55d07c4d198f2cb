"""The manifest's [start]: the Hugging Face checkpoint that a run starts from, in place of random weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from protocol.run.model import Section

MOST_TEMPLATE_BYTES = (
    24 * 1024
)  # of a chat template: the manifest's other settings need the rest of its 64 KiB
MOST_FILES_BYTES = 16 * 1024  # of the checkpoint's small files as they are carried

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Template = Annotated[str, Field(max_length=MOST_TEMPLATE_BYTES)]

Packed = Annotated[str, Field(max_length=MOST_FILES_BYTES, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class Start(Section):
    """What a run starts from.

    The name is for people: a node takes a checkpoint from where its volunteer says, and believes the digests.
    """

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w./-]+$")]
    # SHA-256 over each stage's flat float32 weights, in hex
    digests: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=512)]
    # by which the checkpoint's tokenizer writes chats, in Jinja: for exports, no member runs it
    chat_template: Annotated[Template, Field(exclude_if=lambda template: not template)] = ""
    # its config.json, generation_config.json and the settings of its tokenizer, packed (bootstrap/export/carried.py):
    # for exports, which have them again
    files: Annotated[Packed, Field(exclude_if=lambda files: not files)] = ""
