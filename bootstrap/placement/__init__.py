"""Which device takes which stage: measured links in, a plan out. Pure; `bootstrap.planning` has the command."""

METHOD_NAMES = ("anneal", "genetic", "kernighan-lin", "greedy", "random")  # `plan.METHODS` has the searches
DEFAULT_METHOD = "anneal"
