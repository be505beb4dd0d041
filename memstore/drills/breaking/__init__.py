"""How drills break things, and what keeps them from breaking what they must not."""
