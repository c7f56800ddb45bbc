"""IMDB, and the ablation of SMYRF's hash (SMYRF, supplement §15.1.1)."""
