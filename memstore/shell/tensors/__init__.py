"""Where tensors keep their bytes, and how they lie on slots."""
