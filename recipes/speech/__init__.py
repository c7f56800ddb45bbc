"""Speech recognition with CTC, and inference under a fixed budget."""
