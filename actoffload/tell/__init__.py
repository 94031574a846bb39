"""The text that a person reads about a run: facts, causes found in them, and the report and explanation of both."""
