"""The tokenizer of a run that is looked into from outside."""

from __future__ import annotations

from bootstrap.inspect.observer import Observer
from node.membership.tokenizer_exchange import RunTokenizer
from protocol.manifest import BYTES


async def tokenizer_file(observer: Observer, own: str) -> bytes | None:
    """The run's tokenizer.json, `own` where that is named, else from members; None where bytes are tokens.

    Raises `TokenizerError` when it is not the run's, or nobody gives it.
    """
    if observer.manifest.data.tokenizer == BYTES:
        return None
    await observer.survey()
    tokenizer = RunTokenizer(observer.manifest, observer.rpc, observer.view, own=own)
    await tokenizer.get()
    return tokenizer.raw
