"""The chat template of a checkpoint that a run starts from: its manifest carries it, and exports have it again."""

from __future__ import annotations

import logging

from node.data.tokenizer_files import CONFIG
from node.model.pretrained import Pretrained
from protocol.run.start import MOST_TEMPLATE_BYTES

logger = logging.getLogger(__name__)

TEMPLATE = "chat_template.jinja"
DEFAULT = "default"  # the name of the one that counts, where a tokenizer has several


def chat_template_of(source: Pretrained) -> str:
    """The template that the checkpoint's tokenizer writes chats with; empty where it has none.

    One too large for a manifest is left out with a warning. Raises `CheckpointError` for files that cannot be read.
    """
    raw = (source.text(TEMPLATE) or _in_config(source)).encode(
        errors="replace"
    )  # JSON may hold half characters
    if len(raw) <= MOST_TEMPLATE_BYTES:
        return raw.decode()
    logger.warning(
        "The chat template of %s has more than %d bytes: exports will have none. Copy it from there.",
        source.source,
        MOST_TEMPLATE_BYTES,
    )
    return ""


def _in_config(source: Pretrained) -> str:
    """The template as tokenizer_config.json has it: one text, or several by name."""
    found = source.settings(CONFIG).get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get(DEFAULT)
    return found if isinstance(found, str) else ""
