"""The steps of planning that cost something, in two versions side by side that make the same draws."""
