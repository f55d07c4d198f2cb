"""A Hugging Face checkpoint from a swarm: the whole way, from choosing replicas to the last file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch

from bootstrap.display import bars
from bootstrap.export.carried import carried
from bootstrap.export.checkpoint import (
    Facts,
    model_card,
    save_json,
    weights_of,
    write_shards,
)
from bootstrap.export.ends import GENERATION
from bootstrap.export.fetching import (
    Distrusted,
    GaveNothing,
    RoundEnded,
    Source,
    StageFile,
    choose,
    donors_of,
    earlier_donors,
    fetch_stage,
)
from bootstrap.export.folder import FACTS, PARTIAL, clear_new, clear_partial, put_in_place, write_sums
from bootstrap.export.model_config import config_of
from bootstrap.export.order import DTYPES, ExportOrder, check_order, shard_bytes
from bootstrap.export.tokenizer import fingerprint_of, tokenizer_file, tokenizer_of_run
from bootstrap.inspect.contributors import contributions
from bootstrap.inspect.kept_copies import find_copies
from bootstrap.inspect.observer import Observer, Sighting, visit
from bootstrap.inspect.table import tokens_trained
from node.machine.limits import size
from node.model.stage import parameter_count
from node.watch.words import print_wrapped
from protocol.errors import JoinError, ResourceError, StateError
from protocol.ground import PeerId
from protocol.run.manifest import Manifest

TRIES = 6  # to fetch a stage within a round of its replica

Tell = Callable[[str], None]
StageProgress = Callable[[int, int, int], None]  # (stage, pieces there, of how many)


async def export(
    observer: Observer,
    order: ExportOrder,
    tokenizer: bytes | None = None,
    tell: Tell = lambda sentence: None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Facts:
    """Fetch the slow weights and write a checkpoint. Continues an export that was cut short in the same directory.

    `tokenizer` is the run's tokenizer.json, None where bytes are tokens.
    Raises `JoinError` when a replica goes away or nobody has a stage, `StateError` or `ResourceError` when the
    directory cannot be written; a checkpoint that is there is replaced only when the new one is whole.
    """
    check_order(order)
    tokenizer_of_run(observer.manifest, tokenizer)  # refused before anything is fetched
    sightings = await observer.survey()
    partial = order.directory / PARTIAL
    try:
        partial.mkdir(parents=True, exist_ok=True)
        put_in_place(order.directory)  # one that was stopped on the way there
        _require_disk(observer.manifest, order)
        files = []
        for stage in range(observer.manifest.stages):
            source = await _source(observer, order, stage, partial)
            files.append(await _fetch(observer, order, source, partial, tell, progress))
        facts = _facts(observer, order, [file.source for file in files], sightings)
        facts = replace(
            facts,
            contributions=await contributions(observer, sightings),
            tokenizer_fingerprint=fingerprint_of(observer.manifest, tokenizer),
        )
        _finish(observer, order, files, facts, tokenizer, tell)
    except OSError as error:
        raise StateError(
            f"Cannot write to {order.directory} ({error.strerror}). Free some space or choose another --out; "
            "started again with the same --out it goes on where it stopped."
        ) from None
    return facts


async def _source(
    observer: Observer,
    order: ExportOrder,
    stage: int,
    partial: Path,
    distrusted: Set[PeerId] = frozenset(),
    ended: Sequence[PeerId] = (),
) -> Source:
    """The source of a stage: its replicas, or where none gives its weights a peer that keeps a copy of them.

    Replicas whose rounds have `ended` meanwhile come after others, by how often they are named.
    Raises `JoinError` where nobody has either.
    """
    holders = observer.view.holding(stage, observer.transport.now())
    peers = [peer for peer in ([order.route[stage]] if order.route else holders) if peer not in distrusted]
    parameters = parameter_count(observer.manifest, stage)
    earlier = [] if ended else earlier_donors(partial, observer.signed.run_id, stage)
    try:
        donors = await donors_of(observer, stage, parameters, peers)
    except JoinError:
        if order.route or not distrusted.isdisjoint(holders):
            raise
        copies = [Source.of_copy(stage, kept) for kept in await find_copies(observer, stage, distrusted)]
        if not copies:
            raise
        return next((source for source in copies if source.key == earlier), copies[0])
    donors.sort(key=lambda donor: ended.count(donor.peer))
    return Source(stage, parameters, tuple(choose(donors, order.mean, earlier)), tuple(holders))


async def _fetch(
    observer: Observer, order: ExportOrder, source: Source, partial: Path, tell: Tell, progress: StageProgress
) -> StageFile:
    """Fetch a whole stage, and start again when a replica's round ends meanwhile, or with another that gives more."""
    stage, run_id = source.stage, observer.signed.run_id
    distrusted, ended, rng = set[PeerId](), list[PeerId](), random.SystemRandom()
    for _ in range(TRIES):
        had_some = bool(earlier_donors(partial, run_id, stage))
        file = StageFile(partial, run_id, source)
        there = len(file.present)
        kept = " What was here is of other weights or damaged: started again." if had_some else ""
        if file.present:
            kept = f" {len(file.present)} of its {file.pieces} pieces are here already."
        tell(f"Stage {stage} from {source}.{kept}")
        try:
            await fetch_stage(observer, file, lambda done, total: progress(stage, done, total), rng)
        except RoundEnded as end:
            tell(f"Stage {stage}: {end}; fetching it again.")
            ended.append(end.peer)
        except Distrusted as liar:
            tell(f"Stage {stage}: {liar}.")
            distrusted.add(liar.peer)
            if order.route:
                raise JoinError(f"Stage {stage}: {liar}. Export without this route.") from None
        except GaveNothing as failure:
            distrusted.add(failure.peer)
            # what it gave would be lost: started again the export goes on with it
            if order.route or len(file.present) > there or distrusted.issuperset(source.holders):
                raise
            tell(f"Stage {stage}: {failure}")
        except JoinError as failure:
            if source.copy is None:
                raise
            tell(f"Stage {stage}: {failure}")
            distrusted.add(source.copy.peer)
        else:
            return file
        source = await _source(observer, order, stage, partial, distrusted, ended)
    raise JoinError(
        f"The replicas of stage {stage} are too fast for this link: their rounds end before their weights are "
        "here. Export when the run is complete, from a faster connection, or without --mean."
    )


def _dtype(order: ExportOrder) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[order.dtype])
    return found


def _require_disk(manifest: Manifest, order: ExportOrder) -> None:
    """Refuse an export without room for what is fetched and the checkpoint beside it. Raises `ResourceError`."""
    partial = order.directory / PARTIAL
    here = sum(path.stat().st_blocks * 512 for path in partial.glob("*.f32"))
    needed = _parameters(manifest) * (4 + _dtype(order).itemsize) - here
    free = shutil.disk_usage(order.directory).free
    if needed > free:
        raise ResourceError(
            f"The export of run '{manifest.name}' needs {size(needed)} in {order.directory} while it is made, but "
            f"{size(free)} are free. Free some space or choose another --out."
        )


def _parameters(manifest: Manifest) -> int:
    return sum(weight.place.stop - weight.place.start for weight in weights_of(manifest).values())


def _facts(
    observer: Observer, order: ExportOrder, sources: Sequence[Source], sightings: Sequence[Sighting]
) -> Facts:
    losses = [s.stats.loss for s in sightings if s.stats is not None and s.stats.loss is not None]
    return Facts(
        run_id=observer.signed.run_id,
        manifest=observer.manifest,
        sources=sources,
        parameters=_parameters(observer.manifest),
        dtype=order.dtype,
        tokens=tokens_trained(sightings) or None,
        training_loss=sum(losses) / len(losses) if losses else None,
        validation_loss=order.validation_loss,
        directory=order.directory.name,
    )


def _finish(
    observer: Observer,
    order: ExportOrder,
    files: Sequence[StageFile],
    facts: Facts,
    tokenizer: bytes | None,
    tell: Tell,
) -> None:
    """Write everything into a folder, then move it into place and forget what was fetched.

    Raises `OSError`, and `StateError` where a file that no export has written came in the way meanwhile.
    """
    manifest, dtype = observer.manifest, _dtype(order)
    new = clear_new(order.directory)
    for name in write_shards(manifest, files, new, dtype, shard_bytes(order.shard_size)):
        tell(f"Wrote {name}.")
    describe(tokenizer, new, str(dtype).removeprefix("torch."), facts)
    write_sums(new)
    put_in_place(order.directory)
    clear_partial(order.directory)


def describe(raw: bytes | None, new: Path, dtype: str, facts: Facts) -> None:
    """Write all but the weights: the run's own files, and in place of them those that its checkpoint had."""
    manifest = facts.manifest
    tokenizer = tokenizer_of_run(manifest, raw)
    tokenizer.save(new)
    ids = tokenizer.special_ids()
    save_json(config_of(manifest, dtype, ids), new / "config.json")
    kept = carried(manifest, raw, tokenizer, dtype)
    if not kept.files:
        save_json(ids, new / GENERATION)
    for name, contents in kept.files.items():
        (new / name).write_bytes(contents)
    started = manifest.start.name if manifest.start is not None else ""
    facts = replace(facts, carried=kept.as_markdown(started))
    (new / "README.md").write_text(model_card(facts), encoding="utf-8")
    (new / FACTS).write_text(facts.as_json() + "\n", encoding="utf-8")


async def export_swarm(join: list[str], token: str, order: ExportOrder, tokenizer: str) -> None:
    """Visit a swarm, take its model, and print what it can be used with.

    Raises `JoinError` when nobody answers, and what `export` raises.
    """
    async with visit(join, token) as observer:
        raw = await tokenizer_file(observer, tokenizer)
        with bars() as shown:
            exported = await export(
                observer,
                order,
                raw,
                shown.tell,
                lambda stage, done, total: shown.update(f"Stage {stage}, pieces", done, total),
            )
    print_wrapped(f"Wrote {exported.parameters:,} parameters to {order.directory}. Use them with any of:")
    print_wrapped(f'    noloco generate "Once upon a time" --model {order.directory}')
    print_wrapped(f"    noloco eval --model {order.directory} --data FILE")
    print_wrapped(f"    transformers.AutoModelForCausalLM.from_pretrained({str(order.directory)!r})")
