"""What is handed into a verifier's sandbox: files that import nothing of this project."""
