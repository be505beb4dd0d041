"""What a drill is: its promises, its options, the catalogue, its report."""
