"""A put at its holder: from what a rank passes on to copies that peers have sealed; see README.md."""
