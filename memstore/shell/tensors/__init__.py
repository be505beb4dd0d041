"""Where tensors keep their bytes, and how they lie on slots.

Codec, device copies and DCP stand on it. It knows bytes, shapes and classes of tensors, and no step and no job.
"""
