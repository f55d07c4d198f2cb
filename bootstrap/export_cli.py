"""`noloco export`: the model out of a swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.bars import bars
from bootstrap.export.exporting import DEFAULT_SHARD, Order, check_order
from bootstrap.export.exporting import export as export_model
from bootstrap.model_options import Join, TokenizerFile, tokenizer_file
from bootstrap.observer import visit
from node.command import fail, run_async
from protocol.errors import NolocoError


def export(
    out: Annotated[Path, typer.Option(help="Directory for the checkpoint.")],
    join: Join = None,
    mean: Annotated[
        bool,
        typer.Option("--mean", help="The mean of all replicas of a stage at one round, not one of them."),
    ] = False,
    dtype: Annotated[str, typer.Option(help="Numbers of the checkpoint: fp32 or bf16.")] = "fp32",
    shard_size: Annotated[str, typer.Option(help="Largest file, as 2GB or 500MB.")] = DEFAULT_SHARD,
    tokenizer: TokenizerFile = "",
) -> None:
    """Write a Hugging Face checkpoint of a running or finished swarm.

    Started again with the same --out, an export that was cut short goes on where it stopped.
    """
    order = Order(out, mean, dtype, shard_size)
    try:
        check_order(order)
    except NolocoError as error:
        fail(error)
    run_async(_export(join or [], order, tokenizer))


async def _export(join: list[str], order: Order, tokenizer: str) -> None:
    async with visit(join) as observer:
        raw = await tokenizer_file(observer, tokenizer)
        with bars() as shown:
            exported = await export_model(
                observer,
                order,
                raw,
                shown.tell,
                lambda stage, done, total: shown.update(f"Stage {stage}, pieces", done, total),
            )
    print(f"Wrote {exported.parameters:,} parameters to {order.directory}. Use them with any of:")
    print(f'  noloco generate "Once upon a time" --model {order.directory}')
    print(f"  noloco eval --model {order.directory} --data FILE")
    print(f"  transformers.AutoModelForCausalLM.from_pretrained({str(order.directory)!r})")
