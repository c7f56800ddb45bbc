"""The papers' experiments, one folder each. `python -m recipes.NAME --help` says what each takes."""
