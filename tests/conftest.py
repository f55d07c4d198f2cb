"""Lets tests of every folder import what they share: `from transport_suite import TransportSuite`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
