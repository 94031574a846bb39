"""One step: the identity of its saved storages, their order, the decision to move each, and records of the step."""
