"""What one host's arena holds: slots, replicas on them, room that jobs reserved. Pure."""
