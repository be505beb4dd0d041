"""A TCP proxy and an S3 server that fail on demand."""
