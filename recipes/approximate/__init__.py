"""Replace the attention of a fine-tuned model without training (clustered attention, §4.3)."""
