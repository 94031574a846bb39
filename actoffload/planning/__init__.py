"""Pure: from the profile of a step to a plan, and to a prediction of the step under it. No torch."""
