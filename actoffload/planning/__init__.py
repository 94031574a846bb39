"""Pure: from the profile of a step to a plan, and what a step would be like under it. No torch."""
