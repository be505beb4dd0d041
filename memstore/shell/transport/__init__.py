"""Other ways than TCP for bulk bytes between holders."""
