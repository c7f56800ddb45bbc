"""A pre-trained image generator with attention (SMYRF, supplement §11 and §12)."""
