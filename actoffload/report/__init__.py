"""Pictures of what was measured. The text report is `actoffload.summary`; matplotlib is imported in ``plots`` only."""
