"""What the analysis draws; one palette, one way to save."""
