"""The one interface between peers (`base`), and its two implementations (`libp2p`, `memory`)."""
