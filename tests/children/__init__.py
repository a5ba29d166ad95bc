"""What the tests make their child processes do; every function runs in a child."""
