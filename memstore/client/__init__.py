"""What a training process calls: connect, Store, Reader, tickets, checkpoints."""
