"""Pictures drawn without a display: SVG by default, PNG or PDF by the file's ending."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.machine.extras import optional
from protocol.errors import UserError

optional("matplotlib", "plot").use("Agg")
plt = optional("matplotlib.pyplot", "plot")


@contextmanager
def figure(file: Path, panels: int = 1) -> Iterator[Any]:
    """Axes of a figure that is saved to `file` at the end; a list of axes for several panels.

    Raises `UserError` when the file cannot be written, or its ending names no format.
    """
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"Cannot draw {file}: end its name in .svg, .png or .pdf.")
    # a fixed salt and no date: the same data gives the same file
    with plt.rc_context({"svg.hashsalt": "noloco", "svg.fonttype": "none", "font.size": 9}):
        drawing, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 3.8), squeeze=False)
        for axis in axes[0]:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        try:
            yield axes[0] if panels > 1 else axes[0][0]
            drawing.tight_layout()
            file.parent.mkdir(parents=True, exist_ok=True)
            drawing.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        except OSError as error:
            raise UserError(f"Cannot write {file} ({error.strerror}). Choose another file.") from None
        finally:
            plt.close(drawing)
