"""Masked copy (clustered attention, supplement §3.2; response 001)."""
