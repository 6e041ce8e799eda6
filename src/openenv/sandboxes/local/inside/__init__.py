"""What runs inside a local sandbox: files that are handed in one by one and import nothing of this project."""
