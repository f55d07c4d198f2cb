"""A tokenizer.json made to read text and nothing else: what is spelled like a special token is spelled in pieces.

A tokenizer has two ways to a special token: the list of added tokens, whose names are searched in the text, and the
vocabulary of its model, where a Unigram finds `</s>` as a piece like any other. Here these tokens have names that no
text holds, under the same ids, so neither way leads to one.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeAlias

Settings: TypeAlias = dict[str, Any]  # a tokenizer.json, as the library writes it

_BYTE = re.compile(
    r"<0x[0-9A-Fa-f]{2}>"
)  # of byte fallback: text is written with it, whatever the file calls it


def text_alone(settings: Settings, end_of_text: str) -> Settings:
    """A tokenizer for text alone with the same ids. It always gives the same ids, cuts nothing and adds nothing."""
    hidden = hidden_names(settings, end_of_text)
    added = [
        token | {"content": hidden.get(token["content"], token["content"])}
        for token in settings["added_tokens"]
    ]
    model = _renamed(settings["model"], hidden, unknown_name(settings, end_of_text))
    if model["type"] == "BPE":
        model |= {"dropout": None, "merges": _merges_without(hidden, model)}
    nothing = {"truncation": None, "padding": None, "post_processor": None}
    return settings | {"added_tokens": added, "model": model} | nothing


def hidden_names(settings: Settings, end_of_text: str) -> dict[str, str]:
    """A name that no text holds for each token that none may become.

    Single characters and bytes stay, even where a file calls them special: text is written with them.
    """
    special = [token["content"] for token in settings["added_tokens"] if token["special"]]
    names = [name for name in special if len(name) > 1 and not _BYTE.fullmatch(name)]
    nonce = secrets.token_hex(16)
    return {name: f"{nonce} {place}" for place, name in enumerate(dict.fromkeys([*names, end_of_text]))}


def unknown_name(settings: Settings, end_of_text: str) -> str | None:
    """The token that stands for what the model has none for; None without one, and where it is the end of text."""
    model = settings["model"]
    if model["type"] == "Unigram":
        place = model.get("unk_id")
        name = None if place is None else str(model["vocab"][place][0])
    else:
        name = model.get("unk_token")
        name = name if name in model["vocab"] else None
    return None if name == end_of_text else name


def _renamed(model: Settings, hidden: dict[str, str], unknown: str | None) -> Settings:
    if model["type"] == "Unigram":
        vocabulary = [[hidden.get(name, name), score] for name, score in model["vocab"]]
        return model | {"vocab": vocabulary, "unk_id": None if unknown is None else model["unk_id"]}
    new = {hidden.get(name, name): token for name, token in model["vocab"].items()}
    if unknown is not None:
        return model | {"vocab": new, "unk_token": hidden.get(unknown, unknown)}
    # a name that is not in the vocabulary, where the model must have one: it fails instead
    return model | {"vocab": new, "unk_token": None if model["type"] == "BPE" else secrets.token_hex(16)}


def _merges_without(hidden: dict[str, str], model: Settings) -> list[Any]:
    prefix = model.get("continuing_subword_prefix") or ""
    pairs = [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]
    ]
    return [
        [left, right]
        for left, right in pairs
        if not hidden.keys() & {left, right, left + right.removeprefix(prefix)}
    ]
