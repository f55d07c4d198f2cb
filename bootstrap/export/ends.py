"""The end of a text as a checkpoint says it: by id or by name, in up to four files, of which some may disagree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from node.data.tokenizer import END_OF_TEXT_NAMES, end_of_text_in, parsed
from node.data.tokenizer_files import CONFIG as TOKENIZER_CONFIG
from node.model.checkpoint_kinds import CONFIG
from node.model.pretrained import Pretrained

logger = logging.getLogger(__name__)

GENERATION, SPECIAL_TOKENS = "generation_config.json", "special_tokens_map.json"
BY_NAME = (TOKENIZER_CONFIG, SPECIAL_TOKENS)  # eos_token, of which training appends one to each text
BY_ID = (CONFIG, GENERATION)  # eos_token_id, one or several


def named_end(settings: Mapping[str, object]) -> str:
    """The `eos_token` of a tokenizer's settings, written as text or with its own settings; empty for none."""
    said = settings.get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    return said if isinstance(said, str) else ""


def numbered_ends(settings: Mapping[str, object]) -> list[int]:
    """The ids in `eos_token_id`, one or a list; empty for none."""
    said = settings.get("eos_token_id")
    ids = said if isinstance(said, list) else [said]
    return [token for token in ids if type(token) is int and 0 <= token < 2**31]


def end_of_text_of(source: Pretrained, raw: bytes) -> str:
    """The name of the token that ends texts, of the tokenizer.json `raw`, as the checkpoint says it.

    A warning has what its files do not agree on. Raises `TokenizerError` where neither they nor the names in use
    give one, `CheckpointError` for files that cannot be read.
    """
    end, doubts = end_said(source.settings, raw)
    if doubts:
        logger.warning(
            "%s ends a text in this run. The files of %s do not agree on it: %s. --end-of-text TOKEN takes another.",
            end,
            source.source,
            "; ".join(doubts),
        )
    return end


def end_said(settings: Callable[[str], Mapping[str, object]], raw: bytes) -> tuple[str, list[str]]:
    """The end that the files say whose contents `settings` gives by name, and what in them is against it.

    Where they disagree the tokenizer's are believed; where they say nothing it is the first of the names in use.
    """
    tokenizer = parsed(raw)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    said: dict[str, list[str]] = {}
    doubts: list[str] = []
    for file in BY_NAME:
        named = named_end(settings(file))
        if named and tokenizer.token_to_id(named) is None:
            doubts.append(f"{file} names {named[:64]!r}, which the tokenizer does not have")
        elif named:
            said[file] = [named]
    by_name = {name for names in said.values() for name in names}
    for file in BY_ID:
        found = [(token, tokenizer.id_to_token(token)) for token in numbered_ends(settings(file))]
        ends = [name for _, name in found if name in special | by_name | set(END_OF_TEXT_NAMES)]
        if ends:
            said[file] = ends
        elif found:  # transformers writes the 2 of its Llama where nobody chose one
            token, name = found[0]
            what = "the tokenizer does not have" if name is None else f"is {name[:64]!r}, a piece of text"
            doubts.append(f"{file} gives {token}, which {what}")
    end, others = _agreed(said)
    if not end:
        end = end_of_text_in(raw)
    doubts += [f"{file} says {' or '.join(names)}" for file, names in others.items()]
    return end, doubts


def _agreed(said: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Sequence[str]]]:
    """The end that all files say, else the first file's; and what the files say that do not have it."""
    first = next(iter(said.values()), ())
    end = next((name for name in first if all(name in names for names in said.values())), "")
    end = end or (first[0] if first else "")
    return end, {file: names for file, names in said.items() if end not in names}
