"""The memory of tensors, and its layout over slots."""
