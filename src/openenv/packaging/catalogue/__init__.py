"""Catalogues of environments: metadata of a Git repository at one commit, to search before installing anything."""
