"""What a volunteer never runs: the planner, simulators, studies, disturbance, and swarms in one process."""
