"""Where a drill is played: processes, namespaces, a live cluster."""
