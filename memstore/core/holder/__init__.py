"""What a holder does, step by step, without threads, sockets or a clock; see README.md."""
