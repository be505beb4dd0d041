"""The test kit: clusters, ranks, faults and a simulator for the tests of memstore and of its users."""
