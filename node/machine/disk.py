"""What to do when a file cannot be written."""

from __future__ import annotations

import errno


def advice_for(error: OSError, otherwise: str = "Check its permissions") -> str:
    """The beginning of a sentence. `otherwise` is for all that is neither a full disk nor a limit."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)"
    return otherwise
