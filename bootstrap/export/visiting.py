"""What `noloco export` does: it looks into a swarm, takes the model, and tells what it can be used with."""

from __future__ import annotations

from bootstrap.display import bars
from bootstrap.export.exporting import export
from bootstrap.export.order import ExportOrder
from bootstrap.inspect.observed_tokenizer import tokenizer_file
from bootstrap.inspect.observer import visit


async def export_swarm(join: list[str], order: ExportOrder, tokenizer: str) -> None:
    async with visit(join) as observer:
        raw = await tokenizer_file(observer, tokenizer)
        with bars() as shown:
            exported = await export(
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
