"""Durable storage: files of a folder, objects of a store, the tier over both."""
