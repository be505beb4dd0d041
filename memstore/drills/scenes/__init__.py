"""What happens in each drill."""
