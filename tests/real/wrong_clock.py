"""`noloco` on a machine whose clock is ten seconds ahead, for test_doctor_in_networks.py."""

from __future__ import annotations

import time

AHEAD = 10.0

if __name__ == "__main__":
    right = time.time
    time.time = lambda: right() + AHEAD

    from bootstrap.tools_cli import main

    main()
