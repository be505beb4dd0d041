"""What runs in C where the native helper was built: copies and transfers."""
