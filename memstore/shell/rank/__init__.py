"""A rank's side of its link to the holder."""
