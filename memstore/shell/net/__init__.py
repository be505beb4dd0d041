"""Connections: sockets, TLS, proof of the secret, frames, pacing."""
