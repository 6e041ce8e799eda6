"""What users suffered from, each as a scenario that is written once and runs on any OpenEnv.

Only documented names are used (`openenv.core.**`) and what goes over the wire, so the same code runs with this package
and with the published one. A scenario takes a `Stage`, plays, and returns a verdict: a sentence about what it saw.
`test_published_failures.py` says which verdict belongs to which package.
"""
