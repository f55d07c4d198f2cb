"""`noloco tokenizer`: a vocabulary for a run, made of the founder's text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.display import require_places, write_whole
from bootstrap.model_options import TextFieldOption
from node.command import doing, fail
from node.data.sources import DEFAULT_FIELD, PYTHON_STDLIB, places_of
from node.machine.named import HUB, Use, is_there
from node.watch.words import print_wrapped
from protocol.errors import NolocoError, UserError

ADVICE = "Choose another file with --out."


def tokenizer(
    texts: Annotated[
        list[str], Use.TEXT, typer.Argument(help="Files or globs, a folder, hub:NAME or python-stdlib.")
    ],
    vocab: Annotated[int, typer.Option(min=257, max=1_000_000, help="Number of tokens.")] = 4_096,
    out: Annotated[Path, Use.WRITE_FILE, typer.Option(help="File to write.")] = Path("tokenizer.json"),
    text_field: TextFieldOption = DEFAULT_FIELD,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Train a tokenizer on your text, for --tokenizer.

    It is a byte-level BPE, which can write every text.

    Example: noloco tokenizer 'texts/*.txt' --vocab 4096
    """
    try:
        if is_there(out) and not force:
            raise UserError(f"{out} exists already. {ADVICE[:-1]}, or replace it with --force.")
        require_places(out, advice=ADVICE)
        doing(f"Training a tokenizer of {vocab:,} tokens")
        from bootstrap.creating.own_tokenizer import trained

        named = [text for text in texts if text != PYTHON_STDLIB and not text.startswith(HUB)]
        if is_there(out) and any(out.resolve().is_relative_to(place.resolve()) for place in places_of(named)):
            raise UserError(f"{out} is one of the texts. {ADVICE}")
        made = trained(texts, text_field, vocab)
        write_whole(out, made.raw, ADVICE)
    except NolocoError as error:
        fail(error)
    print_wrapped(
        f"Wrote {out}: {made.tokens:,} tokens, {made.bytes_per_token:.1f} bytes of this text a token."
    )
    print_wrapped(f"Found a run with it: noloco found --preset llama-5m --tokenizer {out}")
