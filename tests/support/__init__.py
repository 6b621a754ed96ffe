"""What the tests share: operands, expected values, tolerances, and calls of operators by name."""
