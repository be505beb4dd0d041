"""What people and metrics are shown of a store; nothing that decides imports it. Pure."""
