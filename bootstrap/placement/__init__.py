"""Which device takes which stage: measured links in, a plan out. Pure; the command is in `bootstrap.plan_cli`."""
