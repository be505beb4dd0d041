"""What people and metrics are told of a store; nothing that decides imports it. Pure."""
