"""The plain values of a drill: its promise, its options, its entry in the catalogue, its report."""
