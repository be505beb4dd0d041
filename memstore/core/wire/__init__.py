"""What travels between processes: frames, and the events and actions of the controller. Pure."""
