"""Long-document embeddings with sentence-transformers."""
