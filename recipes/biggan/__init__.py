"""SMYRF-BigGAN: a generator of images whose self-attention works at full resolution."""
