"""What the benchmarks of the operators share: operands and their check, timing, and reporting."""
