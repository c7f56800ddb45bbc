"""Notebooks, kept as scripts: `python -m notebooks` runs them."""
