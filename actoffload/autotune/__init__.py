"""``policy="auto"``: when to plan, correct a plan and recompute, and how ranks agree on one."""
