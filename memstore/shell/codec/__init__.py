"""From a live state to its stored bytes and back."""
