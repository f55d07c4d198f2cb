"""`noloco plan`: measured links in, which device takes which stage out. Pure but for plan_run and live_plan."""

# of `methods.METHODS`, whose import takes a second
METHOD_NAMES = ("anneal", "genetic", "kernighan-lin", "greedy", "random")
DEFAULT_METHOD = "anneal"
