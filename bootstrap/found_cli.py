"""`noloco-bootstrap`: found a run and keep its seed peer up."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.founding import Founded, chosen_manifest, found, reach_of
from bootstrap.init_cli import init
from bootstrap.run_tokenizer import with_tokenizer
from bootstrap.seed_peer import SeedPeer
from node.command import fail, run_async
from node.data.paths import HUB
from node.data.tokenizer import FILE_NAME, read_tokenizer
from node.machine.ports import port_is_free
from node.machine.signals import on_interrupt
from node.places.outside import announced
from node.watch.health import health_served
from node.watch.log import set_up_logging
from protocol.errors import NolocoError, ResourceError, StateError
from protocol.manifest import PRESETS
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

logger = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(init)


@app.callback(invoke_without_command=True)
def bootstrap(
    context: typer.Context,
    preset: Annotated[str | None, typer.Option(help=f"One of: {', '.join(PRESETS)}.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="A manifest of your own (TOML).")] = None,
    tokenizer: Annotated[
        str, typer.Option(help="The run's tokenizer.json, or hub:NAME; default: bytes are tokens.")
    ] = "",
    end_of_text: Annotated[
        str, typer.Option(help="The tokenizer's token between documents, if it has an unusual name.")
    ] = "",
    from_checkpoint: Annotated[
        str | None, typer.Option(help="Start from this Hugging Face model: a directory, or a hub name.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where keys and manifest are kept.")] = Path(
        "noloco-run"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")] = 31337,
    announce: Annotated[
        list[str] | None,
        typer.Option(envvar="NOLOCO_ANNOUNCE", help="Multiaddress to tell others, behind a mapped port."),
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Also write the addresses to join by to this file, one a line.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Log what the network does, too.")] = False,
) -> None:
    """Found a run: make its keys, sign its manifest, and run the seed peer that newcomers dial first.

    Started again with the same --dir, it takes up the same run. `init` writes a manifest to found a run by.
    """
    if context.invoked_subcommand is not None:
        return
    set_up_logging(verbose)
    try:
        wanted = None
        if preset or manifest or from_checkpoint or tokenizer:
            wanted = chosen_manifest(preset, manifest, from_checkpoint)
        raw = _tokenizer(tokenizer, from_checkpoint)
        if wanted is not None and raw is not None:
            is_preset = manifest is None and from_checkpoint is None
            wanted = with_tokenizer(wanted, raw, end_of_text, is_preset=is_preset)
        founded = found(directory, wanted, raw)
        if port and not port_is_free(host, port):
            raise ResourceError(
                f"Port {port} is in use on {host}. Stop the program that has it, or choose another --port."
            )
    except NolocoError as error:
        fail(error)
    outside = announced(announce or (), port)
    config = Libp2pConfig(host=host, port=port, announce=outside)
    run_async(keep_seed_peer(founded, config, address_file))


def _tokenizer(named: str, checkpoint: str | None) -> bytes | None:
    """The run's tokenizer.json: the one named, else the checkpoint's own, None where bytes are tokens."""
    if not named and checkpoint:
        place = Path(checkpoint)
        if not place.exists():
            named = HUB + checkpoint
        elif (place / FILE_NAME).exists():
            named = checkpoint
    return read_tokenizer(named) if named else None


async def keep_seed_peer(founded: Founded, config: Libp2pConfig, address_file: Path | None) -> None:
    """Run the seed peer until it is told to leave. Raises `ResourceError` when the port is taken."""
    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    seed = SeedPeer(Libp2pTransport(founded.seed_key, config), founded.signed, founded.tokenizer)
    try:
        await seed.start()
        addresses = seed.transport.addresses()
        if address_file is not None:
            write_addresses(address_file, addresses)
        _introduce(founded, addresses)
        async with health_served(founded.seed_key.parent, seed.health):
            await leaving.wait()
        logger.info("The seed peer leaves. The run goes on: newcomers may join through any member.")
    finally:
        await seed.close()


def write_addresses(file: Path, addresses: list[str]) -> None:
    """Raises `StateError` when the file cannot be written."""
    try:
        file.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    except OSError as error:
        raise StateError(f"Cannot write {file} ({error.strerror}). Choose another --address-file.") from None


def _introduce(founded: Founded, addresses: list[str]) -> None:
    manifest = founded.signed.manifest
    doing = "Founded" if founded.is_new else "Taking up"
    print(
        f"{doing} run '{manifest.name}', id {founded.signed.run_id}: "
        f"{manifest.stages} stages, {manifest.model.layers} layers of width {manifest.model.hidden_size}."
    )
    print("Volunteers join with one of these, each in a directory of its own or with --state-dir:")
    for address in addresses:
        print(f"  from {reach_of(address)}:")
        print(f"    noloco-node --join {address}")
    if manifest.start is not None:
        print(
            f"The run starts from '{manifest.start.name}': give the first replica of each stage --from-checkpoint "
            "DIRECTORY, too. Later ones get the weights from it."
        )
    print("Ctrl-C stops the seed peer; the run goes on among its members.", flush=True)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
