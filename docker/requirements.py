"""Prints the requirements that a pyproject.toml names, one a line, for pip: python requirements.py FILE."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], sep="\n")
