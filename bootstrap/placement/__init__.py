"""Which device takes which stage: measured links in, a plan out. Pure; `bootstrap.planning` has the command."""
