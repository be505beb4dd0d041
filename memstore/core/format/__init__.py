"""The layout of a stored state: manifest, object tree, element types. Pure."""
