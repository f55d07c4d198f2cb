"""The one place that imports hivemind (1.1.12), without what the import does to the rest of the process.

The import takes seconds and loads torch; import this module late. What it changes and is put back here: it
installs a log handler of its own with a level, renames the level WARNING to WARN, makes torch share tensors
through the file system and silences two kinds of warnings.
"""
# ruff: noqa: F401

from __future__ import annotations

import logging
import os
import warnings

import torch.multiprocessing

# p2pd logs at this level, into a pipe that Python has to read: only what may explain a failed start is wanted
os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
_sharing_strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
_warning_name = logging.getLevelName(logging.WARNING)
_level = logging.getLogger("hivemind").level  # the program may have set it before

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind uses of torch and Python
    import hivemind.dht.node as hivemind_node
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.dht.traverse import traverse_dht
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, P2PContext, PeerID
    from hivemind.p2p.p2p_daemon import P2PDaemonError
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.timed_storage import ValueWithExpiration

use_hivemind_log_handler("nowhere")  # its messages go where all others go
logging.getLogger("hivemind").setLevel(_level)
logging.addLevelName(logging.WARNING, _warning_name)
torch.multiprocessing.set_sharing_strategy(_sharing_strategy)  # type: ignore[no-untyped-call]
