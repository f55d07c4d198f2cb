"""The imports and kernels that every node needs before it can join, loaded once, in the process they are forked from.

Importing this module takes ten seconds of processor time, more where the kernels were never compiled. It starts no
thread of torch's or Python's, so that the process may fork after it, and has it end with the process that started it.
"""

from __future__ import annotations

import gc

from node.machine.processes import die_with_parent, without_named_locks


def _preload() -> None:
    without_named_locks()
    die_with_parent()  # before the imports: after a Ctrl-C nobody waits for them
    import protocol.codecs.kernels
    from node.model.outer import load_loops

    load_loops()
    protocol.codecs.kernels.load()
    gc.freeze()  # a collection in a node would touch, and so copy, all that it shares with the others


_preload()
