"""The commands of `memstore drill`."""
