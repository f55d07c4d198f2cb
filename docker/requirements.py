"""Prints what a node needs by its pyproject.toml, one requirement a line, for pip: python requirements.py FILE.

Of the extras the one for training data is in the image.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["data"], sep="\n")
