"""The layout of a stored state: manifest, object tree, element types.

`shell/codec` writes it, readers and exports read it; hostile bytes are refused here, before anything is allocated. It
knows no torch: an element type is a name and a size.
"""
