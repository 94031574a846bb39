"""A recorded trace of a run, the numbers in it, and the HTML page that shows them."""
