"""What decodes in each layer, chosen and certified as the prefill is: `coterie.fit(…, decode=True)`."""
