"""This machine: what it can carry, its devices, ports, processes and signals."""
