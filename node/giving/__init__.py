"""What a volunteer gives of a machine, and when."""
