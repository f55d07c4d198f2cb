"""The questions to a founder, each answer checked when it is given: text, tokenizer, who, machines, time, size."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from bootstrap.display import plain_table
from node.command import doing
from node.data.sources import DEFAULT_FIELD, places_of
from node.machine.devices import DEVICES, processor_of
from node.machine.limits import parse_size
from node.machine.named import HUB
from node.watch.words import amount, wrapped
from protocol.errors import ManifestError, NolocoError, UserError
from protocol.run.manifest import BYTES, MOST_LETTERS, Manifest, load_preset, manifest_from

if TYPE_CHECKING:  # torch, for which nobody waits before they have answered
    from bootstrap.creating.proposing import Proposal, Wishes

STDLIB = "python-stdlib"
OWN = "own"
MOST_MACHINES = 1_000
UNITS = {"m": 1 / 60, "h": 1.0, "d": 24.0}  # in hours


@dataclass(frozen=True)
class Answered:
    manifest: Manifest
    tokenizer: bytes | None  # the run's tokenizer.json
    text: str  # the founder's, as of --data; empty where everybody has it


def asked(given: dict[str, object], size: str | None) -> Answered:
    """Ask what `given` flags do not answer, eight questions at most, and return the run that is proposed and chosen.

    Raises `UserError` where no model fits the machines.
    """
    flag = given.get("name")
    name = _name(str(flag)) if flag else _ask("Name of the run", "my-run", _name)
    source = given.get("source")
    text = str(source) if source else _ask("Text: a folder, files, hub:NAME or python-stdlib", STDLIB, _text)
    can_train = text != "local"
    tokenizer = _ask(
        f"Tokens: {'own (made of that text), ' if can_train else ''}bytes, a tokenizer.json or hub:NAME",
        BYTES if not can_train or text == STDLIB else OWN,
        lambda answer: _tokenizer(answer, can_train),
    )
    private = given.get("private")
    is_private = (
        bool(private) if private is not None else _ask("Who may join: anybody, or invited", "anybody", _who)
    )
    machines = _ask("How many machines, about", "4", _machines)
    device = _ask("Memory of each, as 8GB; or its GPU, as 4090", "8GB", _device)
    hours = _ask("How long may it take, as 2h or 3d", "2h", _hours)
    doing("Working out what fits")
    from bootstrap.creating.proposing import Wishes

    return _proposed(Wishes(name, text, tokenizer, is_private, machines, device, hours), size)


def _proposed(wishes: Wishes, size: str | None) -> Answered:
    from bootstrap.checking.cost_tables import in_words
    from bootstrap.checking.fitting import verdict
    from bootstrap.creating.choosing import with_tokenizer
    from bootstrap.creating.proposing import HOME, best, proposals
    from node.data.tokenizer_files import read_tokenizer

    raw = None if wishes.tokenizer in (OWN, BYTES) else read_tokenizer(wishes.tokenizer)
    found = proposals(wishes, None if raw is None else _tokens_of(raw))
    if not found:
        raise UserError(
            f"No model fits {wishes.machines} {wishes.device.name}. Name more machines, or larger ones."
        )
    chosen = _chosen(found, best(found), size)
    manifest = chosen.manifest
    if wishes.tokenizer == OWN:
        raw = _trained(wishes.text, manifest.model.vocab_size)
    if raw is not None:
        manifest = with_tokenizer(manifest, raw, is_preset=True)
    for said in (
        verdict(manifest, [wishes.device], HOME, chosen.replicas, wishes.machines),
        in_words(chosen.cost, chosen.replicas),
    ):
        _console().print(said, highlight=False)
    return Answered(manifest, raw, "" if wishes.text in (STDLIB, "local") else wishes.text)


def _chosen(found: list[Proposal], proposed: Proposal, size: str | None) -> Proposal:
    """Show what fits and ask for one of it, unless there is a `size`. Raises `UserError`."""
    by_name = {proposal.preset: proposal for proposal in found}
    if size is not None:
        load_preset(size)  # a name that there is not says so
        if size not in by_name:
            raise UserError(f"{size} does not fit these machines. Those that do: {', '.join(by_name)}.")
        return by_name[size]
    _console().print(_table(found))

    def chosen(answer: str) -> Proposal:
        if answer not in by_name:
            raise typer.BadParameter(f"Choose one of: {', '.join(by_name)}.")
        return by_name[answer]

    answer: Proposal = _ask("Size of the model", proposed.preset, chosen)
    return answer


def _console() -> Console:
    return Console(markup=False)


def _table(found: Sequence[Proposal]) -> Table:
    """A row for each size: what it is, and what the machines make of it in the time."""
    from bootstrap.creating.proposing import parameters_of

    headings = (
        "size",
        "parameters",
        "vocabulary",
        "stages ×\nreplicas",
        "steps",
        "hours",
        "tokens a\nparameter",
    )
    table = plain_table("", headings, left=("size",))
    for one in found:
        model, steps = one.manifest.model, one.manifest.inner.total_steps
        table.add_row(
            one.preset,
            _millions(parameters_of(one.manifest)),
            f"{model.vocab_size:,}",
            f"{one.manifest.stages} × {one.replicas}",
            f"{steps:,}",
            amount(one.cost.hours),
            amount(one.cost.tokens / parameters_of(one.manifest)),
        )
    return table


def parameters(manifest: Manifest) -> str:
    """Describe how large a model is for people: names count the blocks alone. Without loading torch."""
    model = manifest.model
    blocks = model.layers * model.layer_parameters
    tables = model.table_parameters * (2 - model.tied_embeddings)
    return f"{_millions(blocks)} parameters and a vocabulary of {model.vocab_size:,} ({_millions(tables)})"


def _millions(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def _tokens_of(raw: bytes) -> int:
    from bootstrap.creating.choosing import rows_for
    from node.data.tokenizer import FileTokenizer, end_of_text_in

    return rows_for(FileTokenizer(raw, end_of_text_in(raw)))


def _trained(text: str, vocabulary: int) -> bytes:
    from bootstrap.creating.own_tokenizer import trained

    doing(f"Training a tokenizer of {vocabulary:,} tokens")
    return trained([text], DEFAULT_FIELD, vocabulary).raw


# --- single questions -----------------------------------------------------------------------------


def _ask(question: str, usual: str, check: Callable[[str], Any]) -> Any:
    """Ask until the answer passes; what is wrong with it is said at once."""

    def checked(answer: str) -> Any:
        try:
            return check(answer.strip())
        except (NolocoError, typer.BadParameter) as problem:
            told = wrapped(f"Error: {problem}", sys.stdout)  # as the prompt says it
            raise typer.BadParameter(told.removeprefix("Error: ")) from None

    return typer.prompt(question, default=usual, value_proc=checked)


def _name(answer: str) -> str:
    try:
        return manifest_from(load_preset("tiny").model_dump() | {"name": answer}).name
    except ManifestError:
        mended = re.sub(r"[^A-Za-z0-9._-]+", "-", answer).strip("-._")[:MOST_LETTERS]
        advice = f" Did you mean {mended}?" if mended else ""
        raise UserError(
            "A name begins with a letter or a digit, and has only those, dots, hyphens and underscores, "
            f"{MOST_LETTERS} at most.{advice}"
        ) from None


def _text(answer: str) -> str:
    if answer.startswith(HUB):
        return answer
    try:
        places_of([answer])
    except UserError as problem:
        raise typer.BadParameter(f"{problem} A dataset of the Hugging Face Hub is {HUB}NAME.") from None
    return answer


def _tokenizer(answer: str, can_train: bool) -> str:
    if answer == BYTES or (answer == OWN and can_train):
        return answer
    from node.data.tokenizer_files import read_tokenizer

    _tokens_of(read_tokenizer(answer))
    return answer


def _who(answer: str) -> bool:
    words = {"anybody": False, "invited": True}
    found = [private for word, private in words.items() if answer and word.startswith(answer.lower())]
    if not found:
        raise typer.BadParameter(
            "Answer anybody, or invited: then only those may join to whom you give a token."
        )
    return found[0]


def _machines(answer: str) -> int:
    if not answer.isdecimal() or not 1 <= int(answer) <= MOST_MACHINES:
        raise typer.BadParameter(f"Answer with a number, from 1 to {MOST_MACHINES:,}.")
    return int(answer)


def _device(answer: str) -> Any:
    if answer.lower() in DEVICES and answer != "cpu":
        return DEVICES[answer.lower()]
    try:
        return processor_of(parse_size(answer) / 1e9)
    except ValueError:
        raise typer.BadParameter(f"Answer as 8GB, or with one of: {', '.join(DEVICES)}.") from None


def _hours(answer: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([mhd])[a-z]*", answer.lower())
    hours = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not hours:
        raise typer.BadParameter("Answer as 30min, 2h or 3d.")
    return hours
