"""What this machine can carry, its devices, ports, processes and signals."""
