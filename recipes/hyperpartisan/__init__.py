"""Hyperpartisan news, short and clustered against long and local (SMYRF, supplement §15.1, and response 000)."""
