"""The test kit: what tests of memstore and of its users build on."""
