"""What `noloco status` shows: a running swarm as seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bootstrap.inspect.observer import visit
from bootstrap.inspect.table import Picture, places, save_svg, show


async def show_status(join: Sequence[str], file: Path | None) -> None:
    async with visit(join) as observer:
        sightings = await observer.survey()
        manifest = observer.manifest
        picture = Picture(
            title=f"run '{manifest.name}'  {observer.signed.run_id}  {manifest.stages} stages",
            seconds=max((s.stats.uptime for s in sightings if s.stats is not None), default=0.0),
            expected=0,
            sightings=sightings,
            names={},
            validation=(),
        )
        show(Console(), picture)
        print("\n".join(places(picture)))
        if file is not None:
            save_svg(file, picture)
