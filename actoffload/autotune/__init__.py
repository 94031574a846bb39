"""``policy="auto"``: when the library plans, corrects a plan or recomputes, and how ranks agree on one plan."""
