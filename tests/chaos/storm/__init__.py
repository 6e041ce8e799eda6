"""Episodes through connections that break: a fault proxy, an environment that cannot be fooled, a verdict for each.

Written with documented names only, so that it runs on this package and on the published one alike.
"""
