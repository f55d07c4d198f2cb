"""Swarms in one process: a transport in memory with modelled links, and a loop of virtual time."""
