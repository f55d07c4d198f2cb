"""Looking into a running swarm from outside: its nodes, their links, how far replicas are apart."""
