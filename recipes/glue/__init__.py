"""GLUE (SMYRF, supplement §15.1.2)."""
