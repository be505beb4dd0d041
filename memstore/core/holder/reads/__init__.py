"""What a holder brings here for readers, and from where; see README.md."""
