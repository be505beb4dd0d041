"""Ways in for frameworks: each adapter is thin and sits on the public Store."""
