"""A pre-trained speech model whose encoder attends by mechanisms, without training."""
