"""`noloco-node` on a machine whose last stage takes `SECONDS` for a microbatch, for test_slow_stage_for_real.py."""

from __future__ import annotations

import time
from typing import Any

from node import cli
from node.model.stage_work import StageWork

SECONDS = 90.0


def main() -> None:
    compute = StageWork.last_stage

    def last_stage(self: StageWork, load: Any) -> Any:
        time.sleep(SECONDS)
        return compute(self, load)

    StageWork.last_stage = last_stage  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
