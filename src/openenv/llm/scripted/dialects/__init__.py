"""Dialects: how requests are read and answers written, each in a pure module of its own."""
