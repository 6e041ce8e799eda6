"""The inside of worker processes of the `process` runner: what hosts environments there, and how it starts."""
