"""What recipes share: the command, studies that resume, training, scores, tables."""
