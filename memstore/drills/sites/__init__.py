"""The clusters on which drills are played, the scratch job on them, and the context that a drill's parts share."""
