"""What benchmarks run on: clusters, ranks, floors to compare with."""
